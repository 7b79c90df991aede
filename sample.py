"""
Generates text from a trained model.

    python sample.py                                       # from the newest run in out/
    python sample.py --out_dir=out/python --start="def" --temperature=0.8 --top_p=0.9
    python sample.py --out_dir=path/to/a/huggingface/folder --start=FILE:prompt.txt

The first text appears as it is generated, then the rest of the batch and the speed.
"""
import codecs
import os
import re
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from configurator import UserError, configure, launch, partial_path, visible
from model import (FAMILIES, KVCache, Linear, Replayed, can_pack, checkpoints, choose_compile, choose_device,
                   choose_dtype, family, find_folder, load_model, set_up, upcast, weights_on_disk)
from tokenizer import find_ends, load_tokenizer

# -----------------------------------------------------------------------------
out_dir = ''            # (path) run, checkpoint, Llama, Qwen3, GPT-2: a folder or owner/model ('': newest run in out/)
start = ''              # the prompt as it is (\n is two characters), or FILE:path, whose last line break is left out
                        # ('': a new document, or a new line)
num_samples = 4         # (>= 1, < 1e6) number of texts, generated as one batch
max_new_tokens = 256    # (>= 1, < 1e8) tokens per text (fewer if a text ends)
temperature = 0.8       # (>= 0, < 1e9) below 1 favors likely tokens; 0 always takes the likeliest
top_k = 0               # (>= 0, < 1e9) draw only from the k likeliest tokens (0: all)
top_p = 1.0             # (>= 0, <= 1) draw only from the likeliest tokens that together have this probability
seed = 1337             # (>= 0, < 1e18) same seed, device and options: same text (compiled for a GPU: up to rounding)
device = 'auto'         # auto, cpu, cuda, cuda:1, mps
dtype = 'auto'          # (auto, float32, bfloat16 or float16) may apply to matrices only (GGUF: auto is float16)
compile = False         # generate faster, after half a minute or more of compiling
gguf = ''               # (path) if set, only export to this file, named like model.gguf, for llama.cpp or Ollama
# -----------------------------------------------------------------------------
config = configure(globals(), quiet=True)     # standard output has only the texts

def next_token_probs(logits, texts=(), *, temperature=1.0, top_k=0, top_p=1.0):
    """
    Returns the probability of each next token, (B, V), given logits (B, V): the softmax of logits / temperature over
    the top_k likeliest tokens, cut to the fewest of those that together reach top_p (nucleus sampling,
    arXiv:1904.09751). Parameters after the * are options of sample.py. texts: all ids of each text so far, for a new
    option, which may change logits in place, but must keep at least one token in each row.
    """
    if temperature < 1e-5:          # logits / temperature would overflow
        top_k, temperature = 1, 1.0
    if 0 < top_k < logits.size(-1):
        largest, ids = logits.topk(top_k)
        logits = torch.full_like(logits, float('-inf')).scatter(-1, ids, largest)
    probs = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        largest, ids = probs.sort(descending=True)
        before = largest.cumsum(-1) - largest           # the sum over all likelier tokens
        largest[:, 1:].masked_fill_(before[:, 1:] >= top_p, 0)          # the likeliest always stays
        probs = torch.zeros_like(probs).scatter(-1, ids, largest / largest.sum(-1, keepdim=True))
    return probs

def draw(probs, u):
    """Draws an id from each row of probs (B, V): the first at which the sum of probs exceeds u (B,) of the total."""
    edges = probs.cumsum(-1)
    target = u[:, None] * (1 - 1e-6) * edges[:, -1:]        # below the last edge, also when rounded
    return torch.searchsorted(edges, target, right=True)[:, 0]

@torch.no_grad()
def generate(model, prompts, max_new_tokens, has_ended=lambda text: False, vocab_size=None, seed=0, **sampling):
    """
    Continues a batch of prompts (lists of ids of any length). Yields a list with one id per text, max_new_tokens times
    or until has_ended(ids of prompt and text) is true for all. None stands for the last id of a text that has ended
    (its end token, which is not shown), and for all later ones.

    Text b depends only on its prompt and seed + b (up to rounding). Ids from vocab_size on, which the tokenizer may
    lack, are never drawn. sampling: the options of next_token_probs.
    """
    block_size = model.config.block_size
    texts = [*map(list, prompts)]
    seen = [min(len(prompt), block_size) for prompt in prompts]         # number of last ids of each that the model sees
    u = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed + b)) for b in range(len(prompts))]
    u = torch.stack(u, 1).to(model.lm_head.weight.device)           # u[i, b] draws token i of text b
    size = min(block_size, max(map(len, texts)) + max_new_tokens - 1)           # the last ids need no place
    cache = KVCache(model, len(texts), size)
    ended = set()           # indexes of texts
    logits = None           # of the next tokens, or None if the cache is to be filled
    for i in range(max_new_tokens):
        if logits is None:
            logits = model.prefill([text[-n:] for text, n in zip(texts, seen)], cache)
        drawn = draw(next_token_probs(logits[:, :vocab_size], texts, **sampling), u[i])
        # Start the next step before reading what was drawn, so that a GPU does not wait for Python.
        read = start_reading(drawn)
        logits = model.decode(drawn[:, None], cache) if max(seen) < size else None
        # When the longest one fills the cache, prefill() begins anew. A full context goes on with its last half.
        seen = [n + 1 if n < block_size else max(block_size // 2, 1) for n in seen]
        new = read()
        for b, id in enumerate(new):
            texts[b].append(id)
            if has_ended(texts[b]):
                ended.add(b)
        yield [None if b in ended else id for b, id in enumerate(new)]
        if len(ended) == len(texts):
            return

def start_reading(ids):
    """Starts to copy ids (B,) to the CPU. Returns a function that waits for them, and returns them as a list."""
    if not ids.is_cuda:
        return ids.tolist
    copy, copied = ids.to('cpu', non_blocking=True), torch.cuda.Event()
    copied.record()

    def read():
        copied.synchronize()
        return copy.tolist()

    return read

def prompt_ids(tok, prompt, ends):
    """
    Returns the prompt's ids, after the tokenizer's opening ids (such as Llama's <s>; ours has none) unless the prompt
    begins with them. If that is empty, returns the first of `ends`, which a new text follows, or those of a line break.
    """
    ids = tok.encode(prompt)
    if ids[:len(tok.opening)] != tok.opening:
        ids = tok.opening + ids
    return ids or ends[:1] or [tok.id_of.get(b'\n', 0)]

def texts_of(steps, tok):
    """Returns the texts that the steps of generate() make up."""
    return [tok.decode([id for id in ids if id is not None]) for ids in zip(*steps)]

# -----------------------------------------------------------------------------
# Speed

def prepare_model(model, device, dtype, compiled, rows):
    """
    Prepares a model to generate `rows` texts at once: moves it to `device`, casts it to `dtype`, and may give each
    Linear a faster forward, and the model a compiled decode, which a CUDA GPU replays as a graph.
    """
    packed = dtype == 'float16' and not compiled and can_pack(device)
    one_row = compiled and rows == 1
    weights = torch.float32 if packed else getattr(torch, dtype)
    model.compute_dtype = torch.float32 if one_row else weights
    model.to(device, weights).eval()
    for layer in model.modules():
        if not isinstance(layer, Linear):
            continue
        if packed:
            # This copies the matrix to float16 in FBGEMM's layout, so the weights must not change afterwards. On Zen 4,
            # a row times (32000, 288) takes 0.5 ms; F.linear takes 4.4 ms in float32 and 2.2 in bfloat16. From 16 rows
            # on, bfloat16 is faster by a tenth to a half.
            matrix = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach(), layer.bias)
            layer.forward = partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=matrix)
        elif one_row:
            layer.forward = partial(one_row_linear, layer)
    if compiled:
        if 'cuda' in device:
            # With one text, a GPU is limited by the number of kernels. For GPT-2, the loop joins 172 of them into 123.
            options = dict(coordinate_descent_tuning=one_row)
        else:
            from torch._inductor import config as inductor
            # Freezing lets the compiler pack the matrices (4 texts: 0.7 times as long). As an option of torch.compile
            # it would come too late.
            inductor.freezing = rows > 1
            # Store a matmul's input instead of recomputing it for every output row: 0.7 times as long.
            options = dict(realize_opcount_threshold=0, realize_reads_threshold=0)
        model.decode = torch.compile(model.decode, options=options)
    if 'cuda' in device:
        model.decode = Replayed(model.decode)

def one_row_linear(layer, x):       # x (1, 1, d_in), or a prompt (1, T, d_in)
    # For one row, a compiled loop is 2 to 3 times as fast as F.linear. x is float32, because the loop would convert 16
    # bits again for each row of the matrix.
    if x.numel() > x.size(-1):          # a prompt
        return Linear.forward(layer, x.to(layer.weight.dtype)).to(x.dtype)
    y = (upcast(layer.weight) * x).sum(-1)[None]        # (1, 1, d_out)
    return y if layer.bias is None else y + layer.bias

# -----------------------------------------------------------------------------
# GGUF, the format of llama.cpp and Ollama

# GGUF's names for the fields of GPTConfig. llama.cpp ignores those that a kind of model does not use.
GGUF_KEYS = dict(
    context_length='block_size', block_count='n_layer', embedding_length='n_embd', feed_forward_length='d_ff',
    head_count='n_head', head_count_kv='n_kv_head', key_length='head_dim', value_length='head_dim',
    layer_norm_eps='norm_eps', layer_norm_rms_eps='norm_eps', rope_freq_base='rope_theta',
)

def write_gguf(path, model, tok, ends, dtype):
    """Writes a model and its BPE tokenizer to a GGUF file, with matrices in dtype and the rest in float32."""
    import gguf
    c, kind = model.config, family(model.config)
    if kind not in FAMILIES or not tok.merges:
        raise UserError('only a Llama, Qwen3 or GPT-2 with our BPE can be written; use convert_hf_to_gguf.py instead')
    path = Path(path)
    if path.suffix != '.gguf':          # such as a folder, or the checkpoint itself
        raise UserError(f'the name {path} does not end in .gguf; use one like --gguf=model.gguf')
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = partial_path(path)
    w = gguf.GGUFWriter(unfinished, kind)
    for key, field in GGUF_KEYS.items():
        getattr(w, f'add_{key}')(getattr(c, field))
    add_tokens(w, tok, ends, c.vocab_size)

    matrix = dict(float32='F32', float16='F16', bfloat16='BF16')[dtype]
    w.add_file_type(gguf.LlamaFileType['ALL_F32' if matrix == 'F32' else f'MOSTLY_{matrix}'])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], c.n_layer)
    for name, x in weights_on_disk(model).items():
        if '.c_' in name:       # Hugging Face stores GPT-2's as (in, out)
            x = x.t()
        if kind == 'llama' and re.search('[qk]_proj', name):        # The two rows that rope rotates become neighbors
            x = x.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).reshape(x.shape)
        stored_as = gguf.GGMLQuantizationType[matrix if x.dim() > 1 else 'F32']
        x = gguf.quants.quantize(x.numpy(), stored_as)
        w.add_tensor(names.get_name(name, ('.weight', '.bias')), x, raw_dtype=stored_as)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    unfinished.replace(path)

def add_tokens(w, tok, ends, size):
    """Adds the tokenizer of a model with `size` ids, the last of which may have no token."""
    from gguf import TokenType
    _, bpe, _ = tok.as_json()
    tokens = [f'[unused {id}]' for id in range(size)]
    kinds = [TokenType.UNUSED] * size
    for token, id in bpe['vocab'].items():
        tokens[id] = token
        kinds[id] = TokenType.CONTROL if token in tok.special_ids else TokenType.NORMAL
    w.add_tokenizer_model('gpt2')
    w.add_tokenizer_pre(dict(gpt2='gpt-2', gpt4='dbrx')[tok.pattern_name])      # llama.cpp's names for PATTERNS
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(bpe['merges'])
    w.add_add_bos_token(False)
    end = ends[0] if ends else tok.eot          # Without one, llama.cpp takes 11, a comma in GPT-2's vocabulary
    if end is not None:
        w.add_bos_token_id(end)
        w.add_eos_token_id(end)

# -----------------------------------------------------------------------------
# the command

def say(text):          # standard output has only the texts
    print(text, file=sys.stderr)

def print_texts(run, tok, prompt):
    """Prints the first text as it is generated, then the others and the speed."""
    steps = []
    decoder = codecs.getincrementaldecoder('utf-8')('replace')      # holds back incomplete characters
    print(prompt, end='')
    began = time.perf_counter()
    for ids in run():
        steps.append(ids)
        if ids[0] is not None:
            print(decoder.decode(tok.decode_bytes(ids[:1])), end='', flush=True)
    seconds = time.perf_counter() - began
    print(decoder.decode(b'', True))
    for text in texts_of(steps, tok)[1:]:
        print(f'{"-" * 40}\n{prompt}{text}')
    count = sum(id is not None for ids in steps for id in ids)
    say(f'{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s')

def main():
    saved = [folder for run in Path('out').glob('*') for folder in checkpoints(run)]
    if not (out_dir or saved):
        raise UserError('no run in out/ has a checkpoint yet; run `python train.py`, which takes about 2 minutes')
    folder = find_folder(out_dir or max(saved, key=os.path.getmtime).parent)        # by default, the newest run
    device = choose_device(config['device'])
    set_up(device)
    compiled = choose_compile(compile, device)
    dtype = choose_dtype(config['dtype'], device, num_samples, compiled)
    model = load_model(folder)
    tok = load_tokenizer(folder)
    ends = find_ends(folder, model.config.vocab_size)
    if gguf:
        dtype = config['dtype'].replace('auto', 'float16')
        write_gguf(gguf, model, tok, ends, dtype)
        say(f'wrote {gguf}: {model.num_params():,} parameters, {dtype}')
        return
    prompt = start
    if start.startswith('FILE:'):
        try:
            prompt = Path(start[5:]).expanduser().read_text(encoding='utf-8-sig').removesuffix('\n')    # an editor's
        except (OSError, UnicodeError) as e:
            raise UserError(f'cannot read the prompt ({e}); use FILE: and the path of a text in UTF-8')
    if prompt.endswith(' ') and tok.merges:
        say('the prompt ends with a space; leave it out, because the next token brings its own')
    ids = prompt_ids(tok, prompt, ends)
    if len(ids) > model.config.block_size:
        say(f'the prompt has {len(ids)} tokens; the model sees only the last {model.config.block_size} (its context)')
    prepare_model(model, device, dtype, compiled, num_samples)
    say(f'{visible(folder)} | {model.num_params():,} parameters | {device}, {dtype}, compile {compiled}')
    sampling = {name: config[name] for name in next_token_probs.__kwdefaults__}         # its parameters after the *
    run = partial(generate, model, [ids] * num_samples, max_new_tokens, has_ended=lambda text: text[-1] in ends,
                  vocab_size=tok.vocab_size, seed=seed, **sampling)
    if compiled:
        list(islice(run(), 3))          # untimed: the prompt, then a step to compile, and one to record a CUDA graph
    print_texts(run, tok, prompt)

if __name__ == '__main__':
    launch(main)
