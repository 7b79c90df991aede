"""
Generates text from a trained model.

    python sample.py                                       # from the newest run in out/
    python sample.py --out_dir=out/python --start='def' --temperature=0.8 --top_p=0.9
    python sample.py --out_dir=path/to/a/huggingface/folder --start=FILE:prompt.txt

The first sample appears as it is generated, the others of the batch after it, then the speed.
"""
import codecs
import os
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from configurator import UserError, configure, launch, read_json
from model import (KVCache, can_pack, choose_compile, choose_device, choose_dtype, find_folder, load_model, set_up,
                   write_gguf)
from tokenizer import load_tokenizer

# -----------------------------------------------------------------------------
out_dir = ''            # a run, a checkpoint, a Hugging Face folder, owner/model of the hub; '': the newest run in out/
start = ''              # the prompt, or FILE:path; '': the end-of-text token, so that a new document begins
num_samples = 4         # texts, generated as one batch
max_new_tokens = 256    # tokens per text; a text that ends by itself is shorter
temperature = 0.8       # below 1: the likelier tokens more often; 0: always the likeliest
top_k = 0               # only the k likeliest tokens; 0: all
top_p = 1.0             # only the likeliest tokens that together have this probability
seed = 1337             # the same seed, device and settings give the same text
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # auto, float32, bfloat16, float16: of weights, activations, matmuls; of the matrices alone for
                        # float16 on x86 without compile, and in a GGUF file, where auto is float16
compile = False         # faster tokens, after half a minute of compiling: for long texts
gguf = ''               # instead: write the model to this file for llama.cpp and Ollama, such as model.gguf
# -----------------------------------------------------------------------------
config = configure(globals(), quiet=True)     # standard output is the text alone

def next_token_probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """
    logits (B, V) -> probabilities (B, n) and ids (B, n) of the tokens that may come: softmax of logits / temperature
    for the top_k likeliest tokens, then for the fewest of these that together have top_p (nucleus sampling,
    arXiv:1904.09751). ids is None if all tokens may come, in their order.
    """
    if temperature == 0:
        top_k, temperature = 1, 1.0
    ids = None
    if 0 < top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)
    elif top_p < 1:
        logits, ids = logits.sort(descending=True)
    probs = F.softmax(logits / temperature, -1)
    if top_p < 1:
        before = probs.cumsum(-1) - probs               # what all likelier tokens have together
        probs = probs.masked_fill(before >= top_p, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs, ids

def draw(probs, ids, u):
    """One id (B,) for each row of probabilities, chosen by its number u (B,) in [0, 1)."""
    edges = probs.cumsum(-1)
    target = u[:, None] * (1 - 1e-6) * edges[:, -1:]        # below the last edge: the probability beyond is 0
    i = torch.searchsorted(edges, target, right=True)
    return i[:, 0] if ids is None else ids.gather(-1, i)[:, 0]

@torch.no_grad()
def generate(model, prompts, max_new_tokens, ends=(), vocab_size=None, seed=0, step=None, **sampling):
    """
    Continues a batch of prompts, lists of ids that may differ in length -> yields a list of one id for each text,
    max_new_tokens times or until every text has ended. ends: the ids that end a text, which from then on gets the first
    of them, whichever it was.

    Text i depends on its prompt and seed + i alone. When a context is full, its last half is kept, and all texts go
    through the model again, into an empty cache. Ids from vocab_size on, which the model may have but the tokenizer
    lacks, are never drawn. step: the model for one token at a time, from prepare_model. sampling: what next_token_probs
    takes.
    """
    place, block_size, B = model.lm_head.weight.device, model.config.block_size, len(prompts)
    contexts = [prompt[-block_size:] for prompt in prompts]         # of each text what the model reads, its last part
    u = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed + i)) for i in range(B)]
    u = torch.stack(u, 1).to(place)         # u[i, b] draws token i of text b
    cache = KVCache(model, B, min(block_size, max(map(len, contexts)) + max_new_tokens))
    step = model if step is None else step
    ended = set()           # the numbers of texts

    for i in range(max_new_tokens):
        full = [context for context in contexts if len(context) > block_size]
        for context in full:
            del context[:-max(block_size // 2, 1)]
        if i == 0 or full:
            lengths = torch.tensor([len(context) for context in contexts], device=place)
            idx = pad_sequence([torch.tensor(context, device=place) for context in contexts], batch_first=True)
            logits = model(idx, cache=cache, lengths=lengths)
        else:
            logits = step(new[:, None], cache=cache, decode=True)
        new = draw(*next_token_probs(logits[:, 0, :vocab_size], **sampling), u[i])
        ids = new.tolist()
        ended.update(b for b, id in enumerate(ids) if id in ends)
        for b in ended:
            ids[b] = ends[0]
        yield ids
        if len(ended) == B:
            return
        for context, id in zip(contexts, ids):
            context.append(id)

def prepare_model(model, place, type_, compiled, rows):
    """
    Changes the model for generation: moves it to `place`, casts it to `type_`, and packs its matrices for float16 on a
    CPU without compile. -> the model or its compiled form, which generate calls for one more token of `rows` texts.
    """
    packed = type_ == 'float16' and not compiled and can_pack(place)
    model.compute_dtype = torch.float32 if packed else getattr(torch, type_)
    model.to(place, model.compute_dtype).eval()
    if packed:
        model.pack()
    if not compiled:
        return model
    if 'cuda' in place:         # launches are recorded and played back as one
        return torch.compile(model, dynamic=False, mode='reduce-overhead')
    from torch._inductor import config as inductor
    # the compiler packs the matrices: a token of 4 texts takes 0.7 of the time. torch.compile's options come too late
    inductor.freezing = rows > 1
    # the input of a matrix is stored, not computed again for each of its rows: 0.7 of the time
    options = dict(realize_opcount_threshold=0, realize_reads_threshold=0)
    return torch.compile(model, dynamic=False, options=options)

def prompt_ids(tok, prompt, ends):
    """
    The ids that a text begins with: those that open each text for this tokenizer (Llama's <s>; none in ours), which are
    never shown, then those of the user's prompt. If there are none, the first of `ends`: a new text begins after it.
    """
    ids = tok.opening + tok.encode(prompt)
    return ids or ends[:1] or [0]

def texts_of(steps, tok, ends):
    """The texts that generate's steps make, without their ends."""
    return [tok.decode([id for id in ids if id not in ends]) for ids in zip(*steps)]

# -----------------------------------------------------------------------------
# The evening's reading ends here. What follows is the command.

def find_checkpoint(path):
    """What find_folder finds; for '' the newest checkpoint of the newest run in out/."""
    if not path:
        saved = sorted(Path('out').glob('*/step_*'), key=os.path.getmtime) or [*Path('out').glob('*/config.py')]
        if not saved:
            raise UserError('there is no run in out/ yet: `python train.py` makes one in about 2 minutes')
        path = saved[-1].parent
    return find_folder(path, say)

def find_ends(folder, tok):
    """The ids that end a text: those of config.json, one or a list, else the tokenizer's; perhaps none."""
    ends = read_json(folder / 'config.json').get('eos_token_id')
    if isinstance(ends, list):
        return ends
    return [id for id in (ends, tok.eot) if id is not None][:1]

def say(text):          # to standard error: standard output is the text alone
    print(text, file=sys.stderr)

def print_texts(run, tok, prompt, ends):
    """The first text as it is generated, then the others, and the speed."""
    steps = []
    decoder = codecs.getincrementaldecoder('utf-8')('replace')      # never shows half a character
    print(prompt, end='', flush=True)
    began = time.perf_counter()
    for ids in run():
        steps.append(ids)
        if ids[0] not in ends:
            print(decoder.decode(tok.decode_bytes(ids[:1])), end='', flush=True)
    seconds = time.perf_counter() - began
    print(decoder.decode(b'', True))
    for text in texts_of(steps, tok, ends)[1:]:
        print(f'{"-" * 40}\n{prompt}{text}')
    count = sum(id not in ends for ids in steps for id in ids)
    say(f'{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s')

def main():
    if num_samples < 1 or max_new_tokens < 1 or top_k < 0:
        raise UserError('num_samples and max_new_tokens must be 1 or more, and top_k 0 or more')
    if not 0 < top_p <= 1 or temperature < 0:
        raise UserError('top_p must be above 0 and at most 1, temperature 0 or more; try --temperature=0.8 --top_p=0.9')
    folder = find_checkpoint(out_dir)
    place = choose_device(device)
    set_up(place)
    compiled = choose_compile(compile, place)
    type_ = choose_dtype(dtype, place, num_samples, compiled)
    model = load_model(folder)
    tok = load_tokenizer(folder / 'tokenizer.json')
    ends = find_ends(folder, tok)
    if gguf:
        type_ = choose_dtype('float16' if dtype == 'auto' else dtype, place)
        write_gguf(gguf, model, tok, ends[0] if ends else None, type_)
        say(f'wrote {gguf}: {model.num_params():,} parameters, {type_}')
        return
    prompt = start
    if start.startswith('FILE:'):
        try:
            prompt = Path(start[5:]).read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f'cannot read the prompt {start[5:]}: {e}; check the path')
    ids = prompt_ids(tok, prompt, ends)
    if len(ids) > model.config.block_size:
        say(f'the prompt has {len(ids)} tokens: only the last {model.config.block_size}, the context, are read')
    step = prepare_model(model, place, type_, compiled, num_samples)
    say(f'{folder} | {model.num_params():,} parameters | {place}, {type_}, compile {compiled}')
    run = partial(generate, model, [ids] * num_samples, max_new_tokens, ends, tok.vocab_size, seed, step=step,
                  temperature=temperature, top_k=top_k, top_p=top_p)
    if compiled:
        list(islice(run(), 4))          # not timed: the prompt, then a step each to compile, to warm up and to record
    print_texts(run, tok, prompt, ends)

if __name__ == '__main__':
    launch(main)
