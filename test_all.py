"""
Tests all files: python -m pytest test_all.py

The tests need no network, GPU or data set. Each file has a section (configurator, tokenizer, model, prepare, train,
sample, bench), and end-to-end tests follow. A test compares results with something trusted (torch, tiktoken,
transformers, a plain version, a file on disk) or checks a property that must hold.
"""
import copy
import csv
import errno
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import pkgutil
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock, patch

import huggingface_hub
import numpy as np
import pytest
import regex
import torch
import torch.nn.functional as F
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve().parent
parametrize = pytest.mark.parametrize
not_windows = pytest.mark.skipif(os.name == 'nt', reason='Windows lacks these signals, the resource module and bash')
sys.path.insert(0, str(HERE))
import bench
import configurator
import prepare
import sample
import tokenizer
import train
from configurator import Options, UserError, read_json
from model import (FAMILIES, GPT, GPT2, MLP, UNSAVED_FIELDS, Attention, Block, Embedding, GPTConfig, KVCache, Linear,
                   PassInfo, RMSNorm, apply_rope, can_pack, checkpoints, choose_compile, choose_device, choose_dtype,
                   cross_entropy, family, find_folder, fused_attention, gelu, has_fast_bfloat16, import_config,
                   load_file, load_model, newest_intact, peak_flops, remove_checkpoint, rope_angles,
                   save_checkpoint, save_file, scaled_dot_product_attention, silu, softmax)
from prepare import Shards, find_or_prepare
from sample import generate, write_gguf
from tokenizer import (BYTES, END_OF_TEXT, PATTERNS, START_METHOD, CharTokenizer, Tokenizer, WordCounter,
                       WordTokenizer, add_counts, find_ends, load_tokenizer, merge_words, plain_encode, plain_train,
                       train_bpe)

os.environ['CUDA_VISIBLE_DEVICES'] = ''     # expected results are for the CPU
os.environ.setdefault('OMP_NUM_THREADS', '1')           # also for the children of bench.py
torch.backends.mps.is_available = cache(lambda: False)       # torch 2.14 reads __wrapped__, which a lambda lacks
torch.set_num_threads(1)                    # these models are too small for more

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Runs every test without a network, in a folder with only corpus.txt, and restores signal handlers."""
    monkeypatch.chdir(tmp_path)
    write_corpus()
    torch.manual_seed(0)
    random.seed(0)
    connect = socket.socket.connect

    def connect_here(self, address):
        here = isinstance(address, (str, bytes)) or address[0] in ('127.0.0.1', 'localhost')
        assert here, f'a test connects to {address}, but tests must not need a network'
        return connect(self, address)

    monkeypatch.setattr(socket.socket, 'connect', connect_here)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for s, handler in handlers.items():
        signal.signal(s, handler)

@pytest.fixture
def printed(capsys):
    """Returns a function that returns what was printed since its last call."""
    return lambda: capsys.readouterr().out

def user_error(says):
    return pytest.raises(UserError, match=says)

def launch(*args, status=0, **env):
    """Runs `python <args>` in its own process, as a user would, and checks its exit status."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **env}
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done

def run_main(module, *arguments, **options):
    """Calls module.main() with these options and arguments in this process, because a new Python takes seconds."""
    before = dict(module.config)
    assert options.keys() <= before.keys(), options
    try:
        module.config.update(options)
        module.config.read(arguments)
        return module.main()
    finally:
        module.config.update(before)
        module.config.source.clear()
        module.config.read([])

@contextmanager
def train_options(**options):
    """Sets these options of train.py temporarily."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setattr(train, name, value)
        yield

def make_optimizer(model, rule, **options):
    with train_options(optimizer=rule, **options):
        return train.Optimizer(model)

CODE = ''.join((HERE / f).read_text(encoding='utf-8') for f in ('configurator.py', 'tokenizer.py', 'sample.py'))
CODE = CODE.replace(END_OF_TEXT, '<end>')[:70_000]

def parts_of(text, size):
    return [text[i:i + size] for i in range(0, len(text), size)]

def write(path, *documents):
    """Writes these documents to a text file, creating its folder if necessary."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(END_OF_TEXT.join(documents), encoding='utf-8', newline='')

def write_corpus(path='corpus.txt', documents=30):
    """Writes a small text of several documents: our own source code."""
    parts = parts_of(CODE, len(CODE) // documents)
    write(path, *parts[:documents])

def change(path, old, new):
    """Replaces the first `old` in a file with `new`."""
    text = Path(path).read_text(encoding='latin-1')
    assert old in text
    Path(path).write_text(text.replace(old, new, 1), encoding='latin-1')

def rows(table):
    """Returns a table's lines, each split at ' | '."""
    return [line.split(' | ') for line in table.strip().splitlines()]

def numbers(text):
    return [float(x.replace(',', '')) for x in re.findall(r'-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?', text)]

# Every character that this Python knows. The newest ones are letters in one library and unassigned in another.
CHARS = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ('Cn', 'Cs')]

def random_text(n=200):
    """Returns text that is hard to tokenize: scripts, white space, contractions, digits, emoji, control characters."""
    bits = ("hello~ world~ don't~'LL~'s~'~  ~\n~\n\n ~\t~\r\n~123~4567~é~ déjà~你好~мир~ العربية"
            "~🙂~👩‍👩‍👧~e\u0301~\u3000~\xa0~\x1c~!?~...~ (~_~<|~ſ~'ſ~K").split('~')
    return ''.join(random.choice(bits if random.random() < 0.9 else CHARS[1:]) for _ in range(n))
# -----------------------------------------------------------------------------
# configurator.py

def options_after(*arguments):
    """Returns options after reading some arguments."""
    options = Options(dict(a=1, lr=0.5, name='x', on=True, compile='auto'))
    options.read(arguments)
    return options

def test_arguments_are_read_from_left_to_right_with_the_types_of_the_defaults():
    write('c.py', 'a = 1\nlr = 2\n')        # sets a back to its default
    options = options_after('--a=3', 'c.py', '--name=p=q', '--on=false', '--compile=True')
    assert options == dict(a=1, lr=2.0, name='p=q', on=False, compile=True)
    assert type(options['lr']) is float
    assert options_after('c.py', '--a=3')['a'] == 3
    assert options_after('--on=False', '--on')['on'] is True

def test_a_config_file_sees_the_options_so_far_and_keeps_its_own_names():
    write('c.py', 'import math\n_half = a // 2\nLIMIT = 3\na = _half + LIMIT\ndef f(): pass\n')
    assert options_after('--a=10', 'c.py')['a'] == 8
    assert options_after('--a=10', 'c.py', 'c.py')['a'] == 7

@parametrize('text, says', [
    ('nam = "y"', 'c.py.* did you mean name'),
    ('a = 1.5', 'c.py.* a whole number'),
    ('lr = float("inf")', 'c.py.* a number'),
    ('betas = [0.9, 0.95]', "unknown option betas .c.py."),
    ('a = 2\n\na = 1 / 0', 'c.py, line 3.*division'),
    ('name = "\xe9"', 'c.py.*utf-8'),
])
def test_a_config_file_that_can_not_be_read_is_an_error_that_says_where(text, says):
    Path('c.py').write_text(text, encoding='latin-1')
    with user_error(says):
        options_after('c.py')

def test_options_written_to_a_file_set_themselves_again():
    options = options_after('--a=3', "--name=it's \\ \n new", '--lr=1e-30', '--on=False', '--compile=True')
    write('run.py', configurator.as_file(options))
    assert options_after('run.py') == options_after('--a=9', '--name=z', 'run.py') == options

# A script, and a second that takes its options too, as bench.py does train.py's.
FIRST = """
from configurator import UserError, configure, launch
size = 4        # how big
wide = False
config = configure(globals())

def main():
    if wide:
        raise UserError('too wide; try less')
    print(1 / size)

if __name__ == '__main__':
    launch(main)
"""
SECOND = """
import first
from configurator import configure
more = 1.5
config = configure(globals(), first)
print(first.size, more)
"""

def test_a_script_says_what_was_set_and_sets_it_in_the_script_whose_options_it_takes():
    write('first.py', FIRST)
    write('second.py', SECOND)
    out = launch('second.py', '--size=7', '--more=2', PYTHONPATH=str(HERE)).stdout
    assert out.splitlines() == ['size = 7  (--size=7)', 'more = 2.0  (--more=2)', '7 2.0']

def test_a_config_of_a_notebook_is_left_alone():
    script = dict(__name__='train', config=dict(size=1), size=4)
    assert configurator.configure(script) == dict(size=4)
    assert script['config'] == dict(size=1)

def test_a_bug_keeps_its_traceback():
    write('first.py', FIRST)
    bug = launch('first.py', '--size=0', status=1, PYTHONPATH=str(HERE))
    assert re.search('Traceback.*ZeroDivisionError', bug.stderr, re.S)

@parametrize('error, status, says', [
    (OSError(28, 'No space left on device'), 2, 'make room'),
    (PermissionError(13, 'Permission denied'), 2, 'check the path and its permissions'),
    (FileExistsError(17, 'File exists', 'out'), 2, 'File exists'),       # a broken link
    (OSError(122, 'Disk quota exceeded'), 2, 'make room'),
    (ModuleNotFoundError(name='gguf'), 2, 'pip install gguf'),
    (KeyboardInterrupt(), 130, 'stopped'),
])
def test_a_full_disk_and_ctrl_c_end_a_script_with_one_line(error, status, says, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        configurator.launch(main)
    assert ended.value.code == status
    line, = capsys.readouterr().err.strip().splitlines()
    assert says in line

@parametrize('name, line', rows('''
train | n_kv_head: int = 0 .* key and value heads
sample | top_k = 0 .* only from the k likeliest
prepare | pattern = .gpt2. .* how bpe and word split
bench | learning_rate = 6e-3 .* highest
'''))
def test_help_prints_every_option_with_its_comment(name, line):
    out = launch(HERE / f'{name}.py', '-h' if name == 'sample' else '--help').stdout
    assert re.search(line, out)
    for option in sys.modules[name].config:
        assert re.search(fr'\n *{option}(: \w+)? = ', out)

@not_windows
def test_a_tilde_means_the_home_folder_in_paths_but_not_in_text(monkeypatch):
    monkeypatch.setenv('HOME', os.getcwd())
    options = Options(dict(out_dir='', start='', init_from='', separator='', seed=1))
    options.read(['--out_dir=~/a', '--init_from=auto:~/b', '--start=~/c', '--separator=~'])
    here = os.getcwd()
    assert options == dict(out_dir=f'{here}/a', init_from=f'auto:{here}/b', start='~/c', separator='~', seed=1)

@not_windows
def test_a_folder_without_locks_can_be_used_and_a_lock_that_is_held_is_named(monkeypatch, printed):
    def refuse(self, **_):
        raise OSError(errno.ENOLCK, 'No locks available')

    with configurator.lock(Path('.lock')), user_error('remove .lock, else use another'):
        configurator.lock(Path('.lock'), wait=False)
    monkeypatch.setattr('filelock.FileLock.acquire', refuse)
    with configurator.lock(Path('.lock')):
        assert 'cannot be locked' in printed()

def test_no_file_runs_text_or_unpickles_but_config_files():
    import ast
    runs = r'(?<![.\w])(?:eval|exec|__import__)\(|os\.(?:system|popen|exec)|shell=True|' \
           r'torch\.load|allow_pickle=True|import (?:pickle|marshal|shelve)|runpy\.\w+'
    found = []
    for path in {*HERE.glob('*.py'), *HERE.glob('config/*.py')} - {Path(__file__).resolve()}:
        without_comments = ast.unparse(ast.parse(path.read_bytes()))
        found += [(path.name, call) for call in re.findall(runs, without_comments)]
    assert found == [('configurator.py', 'runpy.run_path')]

# -----------------------------------------------------------------------------
# tokenizer.py

def train_on(text, vocab_size, special_tokens=(), pattern='gpt2', workers=1):
    Path('text.txt').write_bytes(text.encode())
    return train_bpe('text.txt', vocab_size, special_tokens, pattern, workers)

def test_the_plain_form_trains_as_worked_out_by_hand():
    """Uses the words of Sennrich et al. 2016; ties go to the greater pair."""
    text = 'low\n' * 5 + 'lower\n' * 2 + 'widest\n' * 3 + 'newest\n' * 6
    pairs = 's t, e st, o w, l ow, w est, n e, ne west, w i, wi d, wid est, low e, lowe r'
    merges = [tuple(pair.encode().split()) for pair in pairs.split(', ')]
    assert plain_train(text, 12) == merges
    tokens = plain_encode('lowest newer', merges)
    assert b'|'.join(tokens) == b'low|est| |ne|w|e|r'

def tied_text():
    """Returns short words of a few letters, whose pairs often overlap and are often equally frequent."""
    letters = random.choice(['a', 'ab', 'abc', 'aé', 'ab '])
    words = [''.join(random.choices(letters, k=random.randrange(1, 9))) for _ in range(random.randrange(1, 12))]
    return ' '.join(random.choices(words, k=random.randrange(1, 120)))

def test_training_equals_the_plain_form_on_texts_full_of_ties():
    for _ in range(250):
        text = tied_text()
        room = random.choice([0, 1, 5, 20, 1000])
        vocab, merges = train_on(text, 256 + room)
        assert merges == plain_train(text, room)
        tokens = [bytes([i]) for i in range(256)]
        tokens += [a + b for a, b in merges]
        assert vocab == dict(enumerate(tokens))

@parametrize('pattern', PATTERNS)
def test_training_equals_the_plain_form_on_hard_text_in_small_blocks(pattern, monkeypatch):
    monkeypatch.setattr('tokenizer.BLOCK', 50)
    text = random_text(2000) + CODE[:2000]
    _, merges = train_on(text, 256 + 100, pattern=pattern)
    assert merges == plain_train(text, 100, pattern)

@parametrize('workers', [1, 2, 5])
def test_training_gives_the_same_merges_for_any_number_of_workers_and_order_of_texts(workers, monkeypatch):
    monkeypatch.setattr('tokenizer.BLOCK', 2000)
    # These lines have the same words, joined or separate.
    lines = re.findall(r'\S.*\n', CODE[:10_000])
    random.shuffle(lines)
    write('text.txt', *lines)
    vocab, merges = train_bpe('text.txt', 357, [END_OF_TEXT], workers=workers)
    assert merges == plain_train(''.join(lines), 100)
    assert vocab[356] == END_OF_TEXT.encode()

def test_counts_go_beyond_32_bits_and_one_more_decides():
    _, merges = merge_words({b'ab': 2 ** 53 + 1, b'cd': 2 ** 53, b'ef': 5}, 257)
    assert merges == [(b'a', b'b')]

def test_no_merge_crosses_a_special_token():
    _, merges = train_on('ab<|x|>ab<|x|>ab' * 50, 300, ['<|x|>'])
    assert merges == [(b'a', b'b'), (b'ab', b'ab')]     # 'ab' ends one repeat and begins the next

# -----------------------------------------------------------------------------

SPECIALS = [END_OF_TEXT, '<|pad|>']

@pytest.fixture(scope='module', params=PATTERNS)
def trained(request, tmp_path_factory):
    path = tmp_path_factory.mktemp('bpe') / 'text.txt'
    random.seed(5)
    write(path, CODE + random_text(20_000))
    vocab, merges = train_bpe(path, 900, SPECIALS, request.param, workers=1)
    return Tokenizer(vocab, merges, SPECIALS, request.param)

def anew(tok):
    """Returns a copy of a tokenizer that has seen no text yet."""
    return Tokenizer(tok.vocab, tok.merges, tok.special_ids, tok.pattern_name)

@pytest.fixture(scope='module')
def reference(trained):
    import tiktoken
    special = trained.special_ids
    ranks = {token: i for i, token in trained.vocab.items() if i not in special.values()}
    pattern = PATTERNS[trained.pattern_name]
    return tiktoken.Encoding('ours', pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

def test_a_text_has_the_ids_of_tiktoken_and_of_the_plain_form(trained, reference):
    trained = anew(trained)
    for i in range(400):
        text = random_text(random.randrange(60))
        ids = trained.encode(text)
        assert ids == reference.encode_ordinary(text), repr(text)
        assert ids == trained.encode_ordinary(text)         # now that its words are known
        assert trained.decode(ids) == text
        if i < 50:
            tokens = [trained.vocab[i] for i in ids]
            assert tokens == plain_encode(text, trained.merges, trained.pattern_name)

def same_together(tok, reference, texts):
    """Returns whether texts encoded at once, with a token between them, have the ids of tiktoken."""
    raw = b'\xff'.join([text.encode() for text in texts])
    ids = tok.encode_bytes(raw, [tok.eot] * raw.count(b'\xff'))
    assert ids.dtype == np.uint16
    text = END_OF_TEXT.join(texts)
    return ids.tolist() == reference.encode(text, allowed_special={END_OF_TEXT})

def test_many_texts_at_once_have_the_ids_of_tiktoken(trained, reference):
    trained = anew(trained)
    texts = [random_text(random.randrange(12)) for _ in range(3_000)]
    assert same_together(trained, reference, texts)
    assert same_together(trained, reference, ['', '', 'a', ''])

def test_every_character_has_the_ids_of_tiktoken(trained, reference):
    texts = parts_of(''.join(CHARS), 8)
    texts += [f'a{c} b' for c in CHARS[:8000]]
    assert same_together(trained, reference, texts)

def test_a_long_text_has_the_ids_of_tiktoken_wherever_it_begins(trained, reference):
    """Shifts the borders of the parts that a text is encoded in, because they must not affect its ids."""
    text = random_text(50_000)
    for i in range(7):
        assert trained.encode_to_numpy(text[i:]).tolist() == reference.encode_ordinary(text[i:])

def test_long_words_and_texts_have_the_ids_of_tiktoken(trained, reference):
    texts = [bit * n for bit in ('a', 'ab', ' ', '🙂') for n in (99, 333, 9000)]
    texts += [''.join(random.choices('etaoin', k=n)) for n in (14, 15, 16, 17, 400)]
    texts += ['a' * 140_000, ' ' * 140_000 + 'a', CODE]
    # Long and short pieces share an index, where their keys must not collide.
    texts.append('\0' * 16 + 'a' + '\0' * 15 + ' and more' * 400)
    for text in texts:
        ids = reference.encode_ordinary(text)
        assert trained.encode(text) == ids
        assert trained.encode_ordinary(text) == ids
        assert trained.encode_to_numpy(text).tolist() == ids

def draw_tokenizer(seed):
    """Returns (a Tokenizer merging a few letters, in training order or not; the letters; a random source)."""
    numbers = random.Random(seed)
    letters = numbers.choice(['ab', 'abc', 'aé'])
    tokens = [bytes([b]) for b in {*letters.encode()}]
    vocab, merges = {b: bytes([b]) for b in range(256)}, {}
    for _ in range(numbers.randint(1, 40)):
        a, b = numbers.choices(tokens, k=2)
        if len(a + b) <= 12 and (a, b) not in merges and a + b not in tokens:
            merges[a, b] = len(merges)
            tokens = [*dict.fromkeys([*tokens, a + b])]
    for token in tokens:
        if token not in vocab.values():
            vocab[len(vocab)] = token
    return Tokenizer(vocab, merges), letters, numbers

def test_long_words_have_the_ids_that_merging_one_pair_at_a_time_gives():
    for seed in range(150):
        tok, letters, numbers = draw_tokenizer(seed)
        words = [''.join(numbers.choices(letters, k=numbers.choice([9, 40, 70, 400]))) for _ in range(40)]
        expected = [id for word in words for id in [*tok.word_ids(word), ord('.')]]
        assert tok.encode('.'.join([*words, ''])) == expected
        assert [id for word in words for id in [*tok.encode(word), ord('.')]] == expected

@parametrize('pattern', PATTERNS)
def test_ascii_is_cut_as_other_text_is(pattern):
    find = regex.compile(PATTERNS[pattern]).findall
    find_ascii = re.compile(tokenizer.ascii_form(PATTERNS[pattern])).findall
    every = [*map(''.join, itertools.product("as7!'T \t\r\n\v\x1c\x1f", repeat=4)), ''.join(map(chr, range(128)))]
    assert [*map(find_ascii, every)] == [*map(find, every)]

@parametrize('pattern', PATTERNS)
def test_text_is_cut_into_the_words_of_the_pattern(pattern):
    hard = "as7!' \t\n\u3000é"
    texts = list(map(''.join, itertools.product(hard, repeat=3)))
    texts.append('Q'.join(map(''.join, itertools.product(hard, repeat=4))))
    for text in texts:
        words = regex.findall(PATTERNS[pattern], text)
        counted = WordCounter(pattern)(text.encode())
        found = add_counts([counted], pattern)
        assert found == Counter(word.encode() for word in words), repr(text)

@parametrize('raw', [b'', b'a', b'\xef\xbb\xbfbom', b'a\r\nb\r\n\r\n', 'é\u2028\x85'.encode()])
def test_any_file_that_is_utf8_is_trained_on_and_comes_back_byte_by_byte(raw):
    text = raw.decode()
    vocab, merges = train_on(text, 300)
    assert merges == plain_train(text, 44)
    tok = Tokenizer(vocab, merges)
    assert tok.decode_bytes(tok.encode(text)) == raw
    assert tok.decode_bytes(tok.encode_bytes(raw)) == raw

def byte_tokenizer(special_tokens=(END_OF_TEXT,)):
    return Tokenizer(dict(enumerate(BYTES)), [], special_tokens)

def test_ids_are_decoded_from_lists_arrays_and_tensors():
    tok = byte_tokenizer()
    for kind in list, np.array, torch.tensor:
        assert tok.decode(kind([72, 105])) == 'Hi'
    assert tok.decode([]) == ''
    assert tok.decode([0xc3]) == '\ufffd'       # half a character
    for bad in 257, -1:
        with pytest.raises(ValueError, match='outside the vocabulary of 257'):
            tok.decode([5, bad])

class EveryOtherTime(tokenizer.BPETokenizer):
    """Returns a word's bytes as ids at odd calls, and merges it at even ones."""
    calls = 0

    def word_ids(self, word):
        self.calls += 1
        ids = super().word_ids(word)
        return ids if self.calls % 2 == 0 else list(word.encode())

def test_a_subclass_with_its_own_word_ids_is_asked_for_every_word():
    tok = some_tokenizer('gpt2')
    own = EveryOtherTime(tok.vocab, tok.merges, tok.special_ids)
    merged = tok.encode(' def')
    assert merged != [*b' def']
    for n in (1, 2000):
        text = ' def' * 2 * n + END_OF_TEXT
        ids = (list(b' def') + merged) * n + [tok.eot]
        assert own.encode(text) == own.encode_to_numpy(text).tolist() == ids
        assert own.encode_bytes(b' def' * 2 * n + b'\xff', [tok.eot]).tolist() == ids
        assert own.encode_ordinary(' def' * 2 * n) == ids[:-1]

# -----------------------------------------------------------------------------

def cut_at_random(text):
    chunks = []
    while text:
        size = random.randrange(len(text) // 2 + 2)
        chunks.append(text[:size])
        text = text[size:]
    return chunks

def test_a_stream_gives_the_ids_of_the_joined_text_however_it_is_cut(trained):
    specials = [END_OF_TEXT, '<|pad|>', '<|a b|>', 'x<|pad|>yz']
    tok = Tokenizer(trained.vocab, trained.merges, specials, trained.pattern_name)
    others = ['x', 'yz', END_OF_TEXT[:5], '  \n ', " it's ", ' plain words\nand lines ']
    for _ in range(700):
        size = random.choice([1, 7, 40, 300])
        bits = [random_text(6), *specials, *others]
        text = ''.join(random.choices(bits, k=10))
        chunks = cut_at_random(text)
        assert [*encode_iterable(tok, chunks, size)] == tok.encode(text)
    assert [*encode_iterable(tok, [])] == []

def test_a_stream_does_not_wait_for_its_end(trained):
    endless = itertools.cycle(['these words ', 'come again\n'])
    ids = itertools.islice(encode_iterable(trained, endless), 100)
    assert trained.decode([*ids]).startswith('these words come again\nthese')

def test_a_cut_far_from_the_end_is_found():
    word = b'a' * 9999 + b' '
    found = [*tokenizer.blocks([word * 2 + b'a' * 5000] * 40, 20_000)]
    assert b''.join(found) == (word * 2 + b'a' * 5000) * 40
    assert max(map(len, found)) < 60_000

def test_the_longest_special_token_wins_and_ordinary_text_never_has_one():
    specials = ['<|a|>', '<|a|><|a|>', '<|a|>b', 'b<|']
    tok = byte_tokenizer(specials)
    longest_first = sorted(map(re.escape, specials), key=len, reverse=True)
    bits = ['<|', 'a', '|>', 'b', '<|a|>', '|']
    for _ in range(3000):
        text = ''.join(random.choices(bits, k=12))
        ids = tok.encode(text)
        found = [tok.vocab[i].decode() for i in ids if i > 255]
        assert found == re.findall('|'.join(longest_first), text)
        assert tok.encode_to_numpy(text).tolist() == ids
        assert tok.decode(ids) == text
        assert tok.encode_ordinary(text) == list(text.encode())

# -----------------------------------------------------------------------------

def some_tokenizer(kind, text=CODE[:20_000]):
    if kind in PATTERNS:
        vocab, merges = train_on(text, 500, [END_OF_TEXT], kind)
        return Tokenizer(vocab, merges, [END_OF_TEXT], kind)
    if kind == 'char':
        return CharTokenizer(sorted({*text, *'éß'}))
    if kind == 'word':
        words = {word.encode() for word in regex.findall(PATTERNS['gpt4'], text)}
        return WordTokenizer(dict(enumerate([*BYTES, *sorted(words - {*BYTES})])), [], [END_OF_TEXT], 'gpt4')
    return byte_tokenizer()

@parametrize('kind', [*PATTERNS, 'byte', 'char', 'word'])
def test_a_saved_tokenizer_opens_here_and_in_hugging_face_with_the_same_ids(kind):
    import tokenizers
    tok = some_tokenizer(kind)
    tok.save('tokenizer.json')
    again = load_tokenizer('tokenizer.json')
    again.save('again.json')
    assert Path('again.json').read_bytes() == Path('tokenizer.json').read_bytes()
    assert type(again) is type(tok)
    theirs = tokenizers.Tokenizer.from_file('tokenizer.json')
    texts = [f'{CODE[:3100]}{END_OF_TEXT}x', f'x{END_OF_TEXT}\n\ny', '<unk> one two', ' a\n\n b']
    texts += [random_text(20) for _ in range(40)]
    if kind == 'char':
        texts = [''.join(c for c in text if c in tok.ids or c in '<|>') for text in texts]
    for text in texts:
        ids = tok.encode(text)
        assert again.encode(text) == theirs.encode(text).ids == ids
        assert theirs.decode(ids, skip_special_tokens=False) == tok.decode(ids) == text

def test_a_word_has_one_id_and_others_are_spelled_in_bytes():
    tok = some_tokenizer('word', 'the hen')
    ids = tok.encode('the hen then')
    assert [tok.vocab[id] for id in ids] == [b'the', b' hen', *[bytes([b]) for b in b' then']]

def test_a_character_without_a_token_is_named():
    with user_error("lacks 'é'; leave it out"):
        CharTokenizer('fac').encode('café')

@parametrize('pattern', PATTERNS)
def test_the_files_of_a_tokenizer_that_hugging_face_saved_keep_its_ids(pattern):
    import tokenizers
    _, merges = train_on(CODE[:20_000], 500, pattern=pattern)
    tokens = [END_OF_TEXT.encode(), *byte_tokenizer([]).vocab.values(), *[a + b for a, b in merges]]
    Tokenizer(dict(enumerate(tokens)), merges, [END_OF_TEXT], pattern).save('ours.json')
    theirs = tokenizers.Tokenizer.from_file('ours.json')
    theirs.add_special_tokens(['<|pad|>'])
    theirs.save('theirs.json', pretty=False)
    one = load_tokenizer('theirs.json')
    assert one.special_ids == {END_OF_TEXT: 0, '<|pad|>': 501}
    text = CODE[:5000] + END_OF_TEXT + "déjà 你好  12345\t\r\n\n it's"
    ids = one.encode(text)
    assert ids == theirs.encode(text).ids
    assert one.decode(ids) == text
    assert one.merges == merges         # it is opened as our own kind

# -----------------------------------------------------------------------------

# tokenizer | text in its file | replacement | in REFUSED: text in the error
OTHERS = r'''
gpt2 | "truncation": null | "truncation": {"max_length": 99, "strategy": "LongestFirst", "stride": 0}
gpt2 | ing": null | ing": {"strategy": {"Fixed": 9}, "direction": "Left","pad_id": 0,"pad_type_id": 0, "pad_token": ""}
gpt2 | "special": true | "special": false
gpt2 | "\u0104": 4 | "\u0104\u0104": 4
gpt2 | "normalizer": null | "normalizer": {"type": "NFC"}
gpt2 | "add_prefix_space": false | "add_prefix_space": true
gpt2 | "use_regex": true | "use_regex": false
gpt4 | (?i:'s | (?i:'s+
gpt4 | "invert": false | "invert": true
gpt2 | "BPE" | "BPE", "byte_fallback": true
gpt2 | "BPE" | "BPE", "ignore_merges": true
word | (?i:'s | (?i:'s+
gpt2 | "lstrip": false | "lstrip": true
gpt2 | "single_word": false | "single_word": true
'''
REFUSED = r'''
gpt2 | "post_processor": null | "post_processor": {"type": "TemplateProcessing", "single": [1]} | Exception
gpt2 | "pre_tokenizer": { | "pre_tokenizer": null, "decoder": { | Error
gpt2 | "ByteLevel" | "Whitespace" | does not come back
gpt2 | "BPE" | "Unigram" | Exception
gpt2 | "merges": ["h e" | "merges": [["zz", "zz"] | Exception
gpt2 | "merges": ["h e" | "merges": ["a" | Exception
gpt2 | "a": 97 | "a": -1 | Exception
gpt2 | "a": 97 | "a": 1000000000000 | Exception
char | "invert": true | "invert": false | Error
'''

def save_changed(kind, old, new):
    """Saves a tokenizer as t.json and changes the file."""
    some_tokenizer(kind, 'the hen then heard a hen ' * 9).save('t.json')
    load_tokenizer('t.json')
    write('t.json', json.dumps(read_json('t.json')))
    change('t.json', old, new)

@parametrize('kind, old, new, says', rows(REFUSED))
def test_a_file_that_does_not_fit_together_is_refused(kind, old, new, says):
    save_changed(kind, old, new)
    with user_error(f't.json is not a tokenizer this project can use .*{says}'):
        load_tokenizer('t.json')

def same_as_theirs(tok, theirs):
    """Checks that texts have the ids of `tokenizers` and decode alike, except for leading spaces."""
    theirs.no_truncation()
    theirs.no_padding()
    for text in f" the hen's  egg{END_OF_TEXT} then</s> 123", 'é\u0301\n\n 北京 😀', CODE[:5000]:
        for plain in False, True:
            theirs.encode_special_tokens = plain
            ids = theirs.encode(text, add_special_tokens=False).ids
            found = [tok.encode_ordinary(text), tok.encode_bytes(text.encode()).tolist()]
            if not plain:
                found = [tok.encode(text), tok.encode_to_numpy(text).tolist()]
            assert found == [ids, ids]
            assert theirs.decode(ids, skip_special_tokens=False).lstrip(' ') == tok.decode(ids).lstrip(' ')

@parametrize('kind, old, new', rows(OTHERS))
def test_a_file_that_asks_for_more_has_the_ids_of_tokenizers(kind, old, new):
    import tokenizers
    save_changed(kind, old, new)
    same_as_theirs(load_tokenizer('t.json'), tokenizers.Tokenizer.from_file('t.json'))

def save_smollm():
    """Saves t.json like SmolLM's tokenizer, which splits digits."""
    some_tokenizer('gpt2').save('t.json')
    data = read_json('t.json')
    digits = dict(type='Digits', individual_digits=True)
    data['pre_tokenizer'] = dict(type='Sequence', pretokenizers=[digits, data['pre_tokenizer']])
    data['truncation'] = dict(max_length=9, strategy='LongestFirst', stride=0, direction='Right')
    data['padding'] = dict(strategy=dict(Fixed=9), direction='Left', pad_id=0, pad_type_id=0, pad_token='a')
    write('t.json', json.dumps(data))

def save_llama2():
    """Saves t.json like Llama 2's and TinyLlama's: ▁ for a space, no pattern, bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    tokens = ['<unk>', '<s>', '</s>', *[f'<0x{b:02X}>' for b in range(256)], *sorted({*CODE[:20_000], '▁'})]
    merges = [('▁', 't'), ('h', 'e'), ('▁t', 'he'), ('▁', '▁'), ('e', 'n')]
    tokens += [a + b for a, b in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    theirs.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    theirs.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    theirs.add_special_tokens(tokens[:3])
    theirs.save('t.json')

def save_gemma():
    """Saves t.json like Gemma's: no space is put in front, and runs of ▁ (a space) are added tokens."""
    from tokenizers import AddedToken, Tokenizer, normalizers
    save_llama2()
    theirs = Tokenizer.from_file('t.json')
    theirs.normalizer = normalizers.Replace(' ', '▁')
    theirs.add_tokens([AddedToken('▁▁', normalized=False)])
    theirs.save('t.json')

def save_both_ends():
    """Saves Llama 2's tokenizer with a template that also adds the end, as in embedding models."""
    save_llama2()
    tok = read_json('t.json')
    ends = [dict(SpecialToken=dict(id=token, type_id=0)) for token in ('<s>', '</s>')]
    tok['post_processor'] = dict(
        type='TemplateProcessing', single=[ends[0], dict(Sequence=dict(id='A', type_id=0)), ends[1]], pair=[],
        special_tokens={token: dict(id=token, ids=[id], tokens=[token]) for id, token in ((1, '<s>'), (2, '</s>'))})
    write('t.json', json.dumps(tok))

@parametrize('make, end, opening', [
    (save_smollm, END_OF_TEXT, []),
    (save_llama2, '</s>', ['<s>']),
    (save_both_ends, '</s>', ['<s>']),
    (save_gemma, '</s>', ['<s>']),
])
def test_the_tokenizers_of_known_models_open_with_their_ids(make, end, opening):
    import tokenizers
    make()
    theirs = tokenizers.Tokenizer.from_file('t.json')
    tok = load_tokenizer('t.json')
    same_as_theirs(tok, theirs)
    assert (tok.eot, tok.opening) == (theirs.token_to_id(end), [*map(theirs.token_to_id, opening)])
    tok.save('again.json')
    same_as_theirs(load_tokenizer('again.json'), theirs)

def test_an_added_word_that_is_not_special_stays_one():
    import tokenizers
    some_tokenizer('gpt2').save('t.json')
    theirs = tokenizers.Tokenizer.from_file('t.json')
    theirs.add_tokens(['metformin'])
    theirs.save('t.json')
    load_tokenizer('t.json').save('again.json')
    again = tokenizers.Tokenizer.from_file('again.json')
    text = f'a metformin b{END_OF_TEXT}'
    assert again.encode(text).ids == theirs.encode(text).ids == load_tokenizer('again.json').encode(text)
    assert again.decode(again.encode(text).ids) == 'a metformin b'

@parametrize('prompt', ['def', '<s>def', '</s>', ''])
def test_a_prompt_begins_once_with_what_opens_a_text(prompt):
    save_llama2()
    tok = load_tokenizer('t.json')
    ids = sample.prompt_ids(tok, prompt, [2])
    assert ids == [1, *tok.encode(prompt.removeprefix('<s>'))]

# the tokenizer's end-of-text id | config.json | generation_config.json | the ids that end a text, in order
ENDS = '''
null | {} | {} | []
5 | {} | {} | [5]
5 | {"eos_token_id": 7} | {} | [5, 7]
5 | {"eos_token_id": 5} | {"eos_token_id": [5, 9]} | [5, 9]
5 | {"eos_token_id": [7, 8]} | {"eos_token_id": 9} | [5, 7, 8, 9]
null | {"eos_token_id": null} | {"eos_token_id": [9, 8]} | [9, 8]
'''

@parametrize('eot, config, generation, ends', rows(ENDS))
def test_the_ends_of_a_text_are_those_of_the_tokenizer_and_of_both_files(eot, config, generation, ends):
    assert find_ends(Path(), 3) == [3]          # without these files
    write('config.json', config)
    write('generation_config.json', generation)
    assert find_ends(Path(), json.loads(eot)) == json.loads(ends)

def test_a_tokenizer_whose_end_is_not_known_takes_that_of_the_model_beside_it():
    save_smollm()
    change('t.json', f'"content": "{END_OF_TEXT}"', '"content": "<|done|>"')
    os.mkdir('model')
    os.rename('t.json', 'model/tokenizer.json')
    assert load_tokenizer('model/tokenizer.json').eot is None
    with user_error('config.json, with its eos_token_id, next to it'):
        prepare.make_tokenizer('model/tokenizer.json', 0, [])
    end = load_tokenizer('model/tokenizer.json').special_ids['<|done|>']
    write('model/config.json', json.dumps(dict(eos_token_id=[end, 7])))
    folder = run_main(prepare, dataset='corpus.txt', tokenizer='model/tokenizer.json')
    assert read_json(folder / 'meta.json')['eot'] == end
    assert load_tokenizer(folder / 'tokenizer.json').eot == end
    assert load_tokenizer('model').eot == end
    data = Path(folder, 'val_000.bin')
    assert (np.fromfile(data, np.uint16) == end).sum() == read_json(folder / 'meta.json')['val']['documents'] - 1
    with train_options(dataset=str(folder)):
        assert train.open_data(None)[3].tok.eot == end

def test_a_tokenizer_of_another_kind_asks_for_the_package_that_reads_it(monkeypatch):
    save_smollm()
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    with user_error('`pip install tokenizers`'):
        load_tokenizer('t.json')

@parametrize('raw, says', [
    (b'a word, ' * 400 + 'é'.encode() + b'\xff words', '3,202'),
    ('abcdé'.encode()[:-1], '4'),
    (b'a word, ' * 400 + b'\0', '3,200'),
])
def test_text_that_is_not_utf8_is_named_with_its_place(raw, says, monkeypatch):
    monkeypatch.setattr('tokenizer.BLOCK', 7)
    Path('bad.txt').write_bytes(raw)
    with user_error(f'bad.txt is not text in UTF-8 .see byte {says}.*iconv -f cp1252 -t utf-8 .bad.txt. > new.txt'):
        train_bpe('bad.txt', 300, workers=1)

def test_bytes_that_are_no_text_leave_the_tokenizer_as_it_was(trained, reference):
    with pytest.raises(ValueError):
        trained.encode_bytes(b"new'\xc3a\xa9")
    assert same_together(trained, reference, [random_text(300)])

@not_windows
def test_too_few_open_files_for_the_workers_are_one_line():
    write('big.txt', 'word ' * 2_000_000)
    write('few_files.py', 'import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n')
    done = launch(HERE / 'prepare.py', '--dataset=big.txt', '--workers=8', 'few_files.py', status=2)
    says = 'cannot use 8 workers ([Errno 24] Too many open files); use --workers=1, or run ulimit -n 4096 first'
    assert done.stderr == f'error: {says}\n'

def test_windows_gets_no_more_workers_than_it_can_wait_for(monkeypatch):
    monkeypatch.delattr('os.sched_getaffinity', raising=False)
    for there, used in (4, 4), (128, 61):
        monkeypatch.setattr('os.cpu_count', lambda: there)
        assert tokenizer.default_workers() == used

def test_threads_share_a_tokenizer(trained):
    from concurrent.futures import ThreadPoolExecutor
    texts = parts_of(random_text(2000), 30)
    want = [trained.encode(text) for text in texts]

    def encode_all(_):
        return [trained.encode_to_numpy(text).tolist() for text in texts]

    trained = anew(trained)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(encode_all, range(6))]
    sys.setswitchinterval(before)
    assert found == 6 * [want]

SPAWN = '''
import sys
sys.path.insert(0, sys.argv[1])
import tokenizer
tokenizer.BLOCK = 2000
tokenizer.START_METHOD = 'spawn'        # as on Windows and macOS
if __name__ == '__main__':
    vocab, merges = tokenizer.train_bpe('text.txt', 300, workers=2)
    tokenizer.Tokenizer(vocab, merges).save('t.json')
    tokenizer.load_tokenizer('t.json')
'''

def test_without_fork_and_in_an_ascii_locale_all_is_the_same():
    _, merges = train_on(random_text(3000), 300)
    write('spawn.py', SPAWN)
    launch('spawn.py', HERE, LC_ALL='C', PYTHONCOERCECLOCALE='0', PYTHONUTF8='0')
    assert load_tokenizer('t.json').merges == merges
# -----------------------------------------------------------------------------
# model.py

SMALL = dict(block_size=16, vocab_size=50, n_layer=2, n_head=4, n_embd=32)

# Everything below must hold for these architectures and ablations.
SETTINGS = {
    'qwen3': {},
    'qwen3 gqa': dict(n_kv_head=2, head_dim=24),
    'llama': dict(qk_norm=False, rope_theta=500.0, tie_weights=True),
    'llama mqa': dict(qk_norm=False, n_kv_head=1, bias=True),
    'gpt2': {**GPT2, **SMALL},
    'gpt2 untied': {**GPT2, **SMALL, 'tie_weights': False},
    'no norm': dict(norm='none'),
    'post-norm': dict(norm_position='post'),
    'layer norm': dict(norm='layer', mlp='gelu'),
    'no position': dict(position='none', mlp='silu'),
    'naive': dict(attention='naive', n_kv_head=2),
    'llama padded': dict(vocab_size=1100, qk_norm=False),
    'qwen3 tied': dict(vocab_size=1100, tie_weights=True),
    'value embeddings': dict(vocab_size=1100, n_kv_head=2, value_embeds=True),
}
every_setting = parametrize('name', SETTINGS)
# Transformers and GGUF support these.
EXPORTED = ['llama', 'llama mqa', 'llama padded', 'qwen3', 'qwen3 gqa', 'qwen3 tied', 'gpt2', 'gpt2 untied']
needs_compiler = pytest.mark.skipif(not choose_compile('auto', 'cpu', math.inf), reason='cannot compile')
close = torch.testing.assert_close

def small_config(name='qwen3', **fields):
    return GPTConfig(**{**SMALL, **SETTINGS[name], **fields})

def small_gpt(name='qwen3', **fields):
    """Returns a small model of a setting. All weights get noise, because a new model's zeros and ones hide mistakes."""
    model = GPT(small_config(name, **fields))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()

def to_double(model):
    model.compute_dtype = torch.float64
    return model.double()

def twin(model, **fields):
    """Returns another model with the same weights."""
    other = GPT(replace(model.config, **fields))
    other.load_state_dict(model.state_dict())
    return other

def alone(angles=None):
    """Returns the PassInfo for a layer outside a model."""
    return PassInfo(idx=None, positions=None, cos_sin=angles)

def random_ids(*shape):
    return torch.randint(49, shape)

# -----------------------------------------------------------------------------
# arithmetic

def test_functions_are_those_of_torch():
    x = 5 * torch.randn(7, 30)
    targets = torch.arange(7)
    close(silu(x), F.silu(x))
    close(gelu(x), F.gelu(x, approximate='tanh'))
    for y in x, x + 1000, 1000 * x:
        close(softmax(y, 1), y.softmax(1))
        close(cross_entropy(y, targets), F.cross_entropy(y, targets))

def test_the_angle_of_a_far_position_is_not_rounded():
    cos, _ = rope_angles(torch.tensor([100_003]), 2, 10000.0)       # one pair, turned by 1 radian per position
    close(cos, torch.tensor([[100_003.0]]).cos())

WINDOW = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)

@parametrize('attend', [scaled_dot_product_attention, fused_attention])
@parametrize('mask, causal', [(None, False), (None, True), (WINDOW, False), (torch.randn(2, 1, 5, 5), False),
                              (torch.randn(4, 5, 5), False)])
def test_attention_is_that_of_torch_with_any_mask(attend, mask, causal):
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    close(attend(q, k, v, mask, causal), F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))
    # Every two query heads share a head of keys and values.
    k, v = k[:, :2], v[:, :2]
    want = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    close(attend(q, k, v, mask, causal), want)
    # Generation passes only the last query.
    last = None if mask is None else mask[..., -1:, :]
    close(attend(q[..., -1:, :], k, v, last), attend(q, k, v, mask, causal)[..., -1:, :])

@pytest.mark.skipif(not can_pack('cpu'), reason='needs FBGEMM')
@torch.no_grad()
def test_packed_matrices_give_the_same_logits():
    model = small_gpt(bias=True)
    idx = random_ids(3, 5)
    want = model(idx)
    sample.prepare_model(model, 'cpu', 'float16', False, rows=3)
    logits = model(idx)
    assert not torch.equal(logits, want)
    close(logits, want, rtol=5e-3, atol=5e-3)

def test_a_graph_is_replayed_only_for_its_cache_and_shape(monkeypatch):
    def decode(idx, cache):
        return idx * cache.scale

    class Graph:            # stands in for torch.cuda.CUDAGraph, where there is no GPU
        def replay(self):
            replays.append(self)
            replayed.results.copy_(decode(replayed.x, *replayed.key[1:]))

    replays, replayed = [], sample.Replayed(decode)
    monkeypatch.setattr('torch.cuda.CUDAGraph', Graph)
    monkeypatch.setattr('torch.cuda.graph', lambda graph, **_: nullcontext())
    monkeypatch.setattr('torch.Tensor.is_cuda', True)
    for scale, shape in ((2, (3, 1)), (5, (3, 1)), (5, (3, 2))):
        cache = Mock(scale=scale)
        for _ in range(4):
            idx = torch.randint(100, shape)
            assert replayed(idx, cache).equal(idx * scale)
    assert len(replays) == 9 and len(set(replays)) == 3

@parametrize('dtype, compiled', [('float16', True), ('bfloat16', False)])
def test_only_a_model_in_float16_that_is_not_compiled_is_packed(dtype, compiled):
    model = small_gpt()
    sample.prepare_model(model, 'cpu', dtype, compiled, rows=1)
    assert model.lm_head.weight.dtype == getattr(torch, dtype)
    assert model.compute_dtype == (torch.float32 if compiled else torch.bfloat16)

# -----------------------------------------------------------------------------
# the complete model again, on single numbers: numpy arrays only hold them and call the methods of Value

class Value:
    """
    Stores a number, the parts it was computed from, and its slope (derivative) with respect to each part. backward()
    multiplies slopes along each path from a result to its parts, and adds up the paths:

        x = Value(3.0)
        y = x * x + x
        y.backward()        # x.grad is 7.0: 3.0 from each factor of the product, and 1.0 from the sum
    """
    tape = []       # all Values, in order of creation

    def __init__(self, data, *parts):
        self.data = float(data)
        self.parts = parts
        self.grad = 0.0
        Value.tape.append(self)

    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, (self, 1.0), (other, 1.0))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, (self, other.data), (other, self.data))

    def __pow__(self, n):       # n is a plain number
        slope = n * self.data ** (n - 1)
        return Value(self.data ** n, (self, slope))

    def exp(self):
        e = math.exp(self.data)
        return Value(e, (self, e))

    def log(self):
        slope = 1 / self.data
        return Value(math.log(self.data), (self, slope))

    def __truediv__(self, other):
        return self * other ** -1

    def __rtruediv__(self, other):
        return other * self ** -1

    __radd__ = __add__
    __rmul__ = __mul__

    def backward(self):
        """Sets grad, the derivative of this number, in everything it was computed from."""
        self.grad = 1.0
        # Results come after their parts on the tape, so a value's grad is complete when its turn comes.
        for value in reversed(Value.tape):
            for part, slope in value.parts:
                part.grad += value.grad * slope

def plain_linear(x, layer):
    return x @ layer.values.T

def plain_norm(x, layer):
    mean_square = (x * x).sum(-1, keepdims=True) / x.shape[-1]
    return x * (mean_square + 1e-5) ** -0.5 * layer.values

def plain_rope(x, theta):
    """Rotates the pairs (x[i], x[i + hs/2]) of each head of x (nh, T, hs)."""
    _, T, hs = x.shape
    a, b = np.split(x, 2, -1)
    frequencies = theta ** -(np.arange(0, hs, 2) / hs)
    angles = np.outer(range(T), frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos + b * -sin, a * sin + b * cos], -1)

def plain_heads(x, layer, n_head):
    """Projects to heads: x (T, C) -> (nh, T, hs)"""
    return plain_linear(x, layer).reshape(len(x), n_head, -1).swapaxes(0, 1)

def plain_value_embedding(x, idx, layer):
    """Looks up gated values: x (T, C), idx (T,) -> (nh, T, hs)"""
    values = layer.embed_values.values[idx].reshape(len(x), layer.n_kv_head, -1)
    sigmoid = 1 / (np.exp(plain_linear(x[:, :layer.channels], layer.gate_proj) * -1) + 1)
    return (3 * sigmoid[..., None] * values).swapaxes(0, 1)

def plain_attention(x, idx, layer, c):
    """Returns what attention adds to x: x (T, C), idx (T,) -> (T, C)"""
    q = plain_heads(x, layer.q_proj, c.n_head)
    k = plain_heads(x, layer.k_proj, c.n_head)
    v = plain_heads(x, layer.v_proj, c.n_head)
    if layer.value_embed is not None:
        v = v + plain_value_embedding(x, idx, layer.value_embed)
    q = plain_rope(plain_norm(q, layer.q_norm), c.rope_theta)
    k = plain_rope(plain_norm(k, layer.k_norm), c.rope_theta)
    scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    e = np.exp(scores) * np.tri(len(x))             # hides later positions
    y = e / e.sum(-1, keepdims=True) @ v
    y = y.swapaxes(0, 1).reshape(len(x), -1)
    return plain_linear(y, layer.o_proj)

def plain_gpt(model, idx):
    """Computes GPT.forward for one sequence: idx (T,) -> logits (T, vocab_size)"""
    x = model.model.embed_tokens.values[idx]
    for layer in model.model.layers:
        normed = plain_norm(x, layer.input_layernorm)
        x = x + plain_attention(normed, idx, layer.self_attn, model.config)
        normed = plain_norm(x, layer.post_attention_layernorm)
        gate = plain_linear(normed, layer.mlp.gate_proj)
        up = plain_linear(normed, layer.mlp.up_proj)
        swish = gate / (np.exp(gate * -1) + 1)
        x = x + plain_linear(swish * up, layer.mlp.down_proj)
    return plain_linear(plain_norm(x, model.model.norm), model.lm_head)

def test_the_loss_and_every_gradient_are_those_of_the_chain_rule_number_by_number():
    model = to_double(small_gpt(n_embd=8, n_head=2, value_embeds=True))
    layers = [layer for layer in model.modules() if hasattr(layer, 'weight')]
    for layer in layers:
        layer.values = np.vectorize(Value)(layer.weight.detach())
    idx, targets = random_ids(2, 4)
    e = np.exp(plain_gpt(model, idx))
    probs = e / e.sum(-1, keepdims=True)
    mean = np.log(probs[range(4), targets]).sum() / -4
    mean.backward()

    loss = model(idx[None], targets[None])
    loss.backward()
    assert loss.item() == pytest.approx(mean.data)
    for layer in layers:
        grad = np.vectorize(lambda value: value.grad)(layer.values)
        close(layer.weight.grad, torch.tensor(grad), rtol=1e-5, atol=1e-8)

# -----------------------------------------------------------------------------
# properties of every setting

@every_setting
def test_no_position_sees_the_future_and_every_position_sees_the_past(name):
    model = to_double(small_gpt(name))
    idx = random_ids(1, 16)
    changed = idx.repeat(16, 1)
    changed.diagonal().add_(1)          # row i has a different token at position i
    difference = (model(changed) - model(idx)).abs().amax(-1)
    sees = torch.ones(16, 16, dtype=torch.bool).triu()
    assert torch.equal(difference > 1e-9, sees)

def windows(attention, info, S):
    """Replaces Attention.mask: the second layer sees three tokens alone."""
    keys = torch.arange(S, device=info.positions.device)
    positions = info.positions[..., None, :, None]
    return (keys <= positions) & (keys > positions - (3 if attention.layer == 1 else S))

@parametrize('attention', ['flash', 'naive'])
def test_a_layer_may_have_a_mask_of_its_own(attention, monkeypatch):
    monkeypatch.setattr('model.Attention.mask', windows)
    test_with_or_without_a_cache_logits_are_the_same('qwen3')
    layer = to_double(small_gpt(attention=attention)).model.layers[1].self_attn
    info = PassInfo(idx=None, positions=torch.arange(16)[None])
    x = torch.randn(1, 16, layer.config.n_embd, dtype=torch.float64)
    y = layer(x, info)
    x[0, 4] += 1
    moved = (layer(x, info) - y).abs().amax(-1)[0] > 1e-9
    assert moved.nonzero()[:, 0].tolist() == [4, 5, 6]

@every_setting
def test_with_or_without_a_cache_logits_are_the_same(name):
    model = small_gpt(name)
    idx = random_ids(3, 16)
    rows = torch.arange(3)
    lengths = torch.tensor([4, 1, 7])
    filler = torch.arange(7) >= lengths[:, None]
    prompts = idx[:, :7].masked_fill(filler, 49)
    cache = KVCache(model, 3, 16)
    with torch.no_grad():
        want = model(idx)
        logits = model.prefill(prompts, lengths, cache)
        for n in 1, 1, 3, 2, 2:         # tokens at a time
            close(logits, want[rows, lengths - 1])
            logits = model.decode(idx[rows[:, None], lengths[:, None] + torch.arange(n)], cache)
            lengths = lengths + n

@parametrize('ours, theirs', [('flash', 'sdpa'), ('naive', 'eager')])
def test_dropout_falls_where_it_does_in_gpt2_and_in_training_alone(ours, theirs):
    from transformers import AutoModelForCausalLM
    model = small_gpt('gpt2', dropout=0.1, attention=ours)          # transformers' default; config.json omits it
    idx = random_ids(2, 16)
    other = AutoModelForCausalLM.from_pretrained(save(model), attn_implementation=theirs)
    same_logits(model, other)
    model.train()
    other.train()
    torch.manual_seed(1)
    logits = model(idx)
    torch.manual_seed(1)
    close(logits, other(idx).logits)

def test_post_norm_is_a_norm_of_each_sum_and_the_plain_mlp_has_no_gate():
    block = small_gpt('post-norm', position='none', mlp='silu').model.layers[0]
    x = torch.randn(2, 16, 32)
    context = alone()
    y = block.input_layernorm(x + block.self_attn(x, context))
    mlp = block.mlp.down_proj(F.silu(block.mlp.up_proj(y)))
    close(block(x, context), block.post_attention_layernorm(y + mlp))

@needs_compiler
def test_compiled_training_has_the_loss_and_the_gradients_of_the_naive_form():
    flash = small_gpt(n_layer=1, norm='none', qk_norm=False, n_kv_head=2)       # small, because compiling is slow
    naive = twin(flash, attention='naive')
    idx, targets = random_ids(2, 3, 16)
    compiled = torch.compile(flash)
    losses = compiled(idx, targets), naive(idx, targets)
    sum(losses).backward()
    close(*losses)
    for p, q in zip(flash.parameters(), naive.parameters()):
        close(p.grad, q.grad)

@every_setting
def test_the_loss_begins_at_the_log_of_the_vocabulary(name):
    model = GPT(small_config(name, vocab_size=1100))
    loss = model(*torch.randint(1100, (2, 4, 16)))
    assert loss.item() == pytest.approx(math.log(1100), rel=0.02)

@parametrize('name', ['llama padded', 'qwen3 tied', 'value embeddings'])
def test_the_padding_of_the_vocabulary_never_matters(name):
    model = small_gpt(name)
    idx = random_ids(2, 16)
    logits = model(idx)
    loss = model(idx, idx)
    loss.backward()
    for table in model.model.embed_tokens.weight, model.lm_head.weight:
        assert not table.grad[1100:].any()
        table.data[1100:] = 9.0
    assert torch.equal(model(idx), logits)
    assert torch.equal(model(idx, idx), loss)

# -----------------------------------------------------------------------------
# model folders, our own and other people's

def save(model, folder='step_00000001', eot=None):
    byte_tokenizer().save('tokenizer.json')
    folder, tensors = Path(folder), dict(moments=torch.ones(3))
    save_checkpoint(folder, model, Path('tokenizer.json'), eot, dict(step=1), tensors, 'No UTF-8: \udcff')
    return folder

@every_setting
def test_a_checkpoint_gives_the_same_model_back(name):
    model = small_gpt(name)
    idx = random_ids(2, 16)
    again = load_model(save(model), attention=model.config.attention)
    assert again.config == model.config
    assert torch.equal(again(idx), model(idx))

def same_logits(ours, theirs):
    """Checks that our model and one of transformers have the same logits."""
    idx = random_ids(2, ours.config.block_size)
    close(ours(idx), theirs(idx).logits)

@parametrize('name', EXPORTED)
def test_transformers_opens_a_checkpoint_with_the_same_logits(name):
    from transformers import AutoModelForCausalLM
    pytest.importorskip(f'transformers.models.{name.split()[0]}')       # the oldest version lacks SmolLM3
    model = small_gpt(name)
    theirs = AutoModelForCausalLM.from_pretrained(save(model))
    same_logits(model, theirs)
    assert theirs.config.model_type == name.split()[0]

# setting | key of config.json that other programs look for | value
LOOKED_FOR = '''
qwen3 | max_window_layers | 2
qwen3 | attention_bias | False
qwen3 | sliding_window | None
gpt2 | n_ctx | 16
'''

@parametrize('name, key, value', rows(LOOKED_FOR))
def test_a_checkpoint_has_what_other_programs_look_for(name, key, value):
    folder = save(small_gpt(name))
    assert str(read_json(folder / 'config.json')[key]) == value
    # vLLM, SGLang and nano-vllm read every *.safetensors; mlx-lm expects GPT-2's weights without a prefix.
    [weights] = folder.glob('*.safetensors')
    assert not any(name.startswith('transformer.') for name in load_file(weights))

def test_a_real_qwen3_says_other_things_of_its_layers():
    save_theirs('Qwen3')
    change('theirs/config.json', '"max_window_layers": ', '"max_window_layers": 2')
    assert import_config(Path('theirs')).n_layer == 2

@parametrize('kind', FAMILIES)
def test_the_models_of_others_have_all_their_fields_and_need_no_defaults_of_ours(kind):
    _, keys, values, _ = FAMILIES[kind]
    others = GPTConfig.__dataclass_fields__.keys() - {*keys.values(), *values, *UNSAVED_FIELDS}
    assert not any(getattr(GPTConfig(), name) for name in others), 'add a field that is on by default to LLAMA'

@parametrize('kind', ['gpt2', 'no norm'])
def test_dropout_is_not_saved_and_a_loaded_model_is_ready_for_evaluation(kind):
    model = load_model(save(small_gpt(kind, dropout=0.1)))
    assert (model.config.dropout, model.training) == (0.0, False)

def test_a_model_with_a_new_field_is_none_of_others(monkeypatch):
    @dataclass
    class Longer(GPTConfig):
        window: int = 0

    monkeypatch.setattr('model.GPTConfig', Longer)
    assert [family(Longer(window=n)) for n in (0, 7)] == ['qwen3', 'gpt_ablation']
    config = save(small_gpt('no norm')) / 'config.json'
    change(config, '"gpt_config": {', '"gpt_config": {"height": 7,')
    with user_error('config.json describes no model .TypeError.*height'):
        find_folder(str(config.parent))

def test_who_may_read_one_file_of_a_checkpoint_may_read_all():
    assert len({path.stat().st_mode for path in save(small_gpt()).iterdir()}) == 1

def test_transformers_opens_the_tokenizer_and_knows_the_end_of_a_text():
    from transformers import AutoTokenizer
    folder = save(small_gpt(vocab_size=257), eot=256)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs('hé').input_ids == list('hé'.encode())
    assert theirs.eos_token_id == theirs.unk_token_id == 256
    assert read_json(folder / 'config.json')['eos_token_id'] == 256
    batch = theirs(['h', 'hé'], padding=True)
    assert {*batch} == {'input_ids', 'attention_mask'}
    assert batch.input_ids == [[104, 256, 256], list('hé'.encode())]
    assert batch.attention_mask == [[1, 0, 0], [1, 1, 1]]

def save_theirs(kind, vocab_size=60, **more):
    """Saves a small model of transformers, with noise in all weights, to theirs/. Returns the model."""
    import transformers
    pytest.importorskip(f'transformers.models.{kind.lower()}')
    # GPT2Config accepts the first four names as aliases.
    config = getattr(transformers, f'{kind}Config')(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32, intermediate_size=48,
        num_key_value_heads=2, head_dim=12, rope_theta=500.0, vocab_size=vocab_size, pad_token_id=0, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data = (p + 0.1 * torch.randn_like(p)).bfloat16().float()
    model.save_pretrained('theirs')
    return model.eval()

# kinds of models in transformers, and their settings there
THEIRS = {
    'Llama': {},
    'Qwen3': {},
    'GPT2': {},
}

@parametrize('kind', THEIRS)
def test_a_folder_that_transformers_saved_loads_with_the_same_logits_and_text(kind):
    theirs = save_theirs(kind, **THEIRS[kind])
    ours = load_model('theirs')
    same_logits(ours, theirs)
    [text] = theirs.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=20, do_sample=False, eos_token_id=99).tolist()
    assert draws(ours, [[7, 8, 9]], 20, temperature=0) == [text[3:]]
    same_logits(load_model(save(ours)), theirs)
    copy.deepcopy(theirs).bfloat16().save_pretrained('small', max_shard_size='20KB')
    assert len([*Path('small').glob('model-*')]) > 1
    same_logits(load_model('small'), theirs)

def test_a_llama_of_an_older_transformers_keeps_its_rope_theta():
    theirs = save_theirs('Llama')
    config = read_json('theirs/config.json')
    config.pop('rope_parameters', None)             # written by transformers 5
    write('theirs/config.json', json.dumps(config | dict(rope_theta=500.0)))
    tensors = load_file('theirs/model.safetensors')
    save_file(tensors | {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(4)}, 'theirs/model.safetensors')
    same_logits(load_model('theirs'), theirs)

@parametrize('name', ['qwen3', 'llama mqa', 'gpt2'])
def test_a_model_that_transformers_resized_and_trained_comes_back(name):
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(save(small_gpt(name)))
    theirs.resize_token_embeddings(90)
    ids = random_ids(2, 8)
    theirs(ids, labels=ids).loss.backward()
    optim.SGD(theirs.parameters(), lr=0.1).step()
    theirs.save_pretrained('back')
    ours = load_model('back')
    assert ours.config.vocab_size == 90
    same_logits(ours, theirs)

def test_the_context_of_a_model_is_not_guessed():
    save_theirs('Llama')
    config = read_json('theirs/config.json')
    del config['max_position_embeddings']
    write('theirs/config.json', json.dumps(config))
    with user_error('theirs/config.json describes no model .KeyError: .block_size'):
        find_folder('theirs')

def test_parts_that_the_index_does_not_name_are_not_read():
    theirs = save_theirs('Llama')
    os.remove('theirs/model.safetensors')
    theirs.save_pretrained('theirs', max_shard_size='20KB')
    old = load_file(min(Path('theirs').glob('model-0*')))
    save_file({name: x + 1 for name, x in old.items()}, 'theirs/model-00001-of-00099.safetensors')
    same_logits(load_model('theirs'), theirs)
    os.remove(min(Path('theirs').glob('model-0*[!9].safetensors')))
    with user_error('do not match'):
        load_model('theirs')

def test_gpt2_loads_as_the_hub_has_it():
    theirs = save_theirs('GPT2')
    theirs.transformer.save_pretrained('theirs')            # without a head, names have no prefix
    tensors = load_file('theirs/model.safetensors')
    tensors['h.0.attn.bias'] = torch.ones(1, 1, 32, 32)
    save_file(tensors, 'theirs/model.safetensors')
    config = read_json('theirs/config.json')
    config.pop('tie_word_embeddings', None)         # transformers 4 leaves it out
    write('theirs/config.json', json.dumps(config))
    ours = load_model('theirs')
    same_logits(ours, theirs)
    assert all(p.is_contiguous() for p in ours.parameters())        # otherwise copies could not be saved

# name in llama.cpp | our name
WEIGHTS_OF_GGUF = '''
token_embd | model.embed_tokens
position_embd | model.embed_positions
output_norm | model.norm
output | lm_head
attn_norm | input_layernorm
attn_q | self_attn.q_proj
attn_k | self_attn.k_proj
attn_v | self_attn.v_proj
attn_qkv | self_attn.qkv_proj
attn_q_norm | self_attn.q_norm
attn_k_norm | self_attn.k_norm
attn_output | self_attn.o_proj
ffn_norm | post_attention_layernorm
ffn_gate | mlp.gate_proj
ffn_up | mlp.up_proj
ffn_down | mlp.down_proj
'''
FIELDS_OF_GGUF = '''
context_length | block_size
block_count | n_layer
embedding_length | n_embd
feed_forward_length | d_ff
attention.head_count | n_head
attention.head_count_kv | n_kv_head
attention.key_length | head_dim
attention.value_length | head_dim
attention.layer_norm_epsilon | norm_eps
attention.layer_norm_rms_epsilon | norm_eps
rope.freq_base | rope_theta
'''

def weights_of_gguf(reader, kind, c):
    """Returns the state_dict in a GGUF file, without a tied head."""
    weights, ours = {}, dict(rows(WEIGHTS_OF_GGUF))
    heads = dict(attn_q=c.n_head, attn_k=c.n_kv_head) if kind == 'llama' else {}
    for tensor in reader.tensors:
        x = torch.tensor(tensor.data)
        name = tensor.name.replace('blk', 'model.layers')
        part = name.split('.')[-2]
        name = name.replace(f'{part}.', f'{ours[part]}.')
        if part in heads:       # rows that rope rotates as a pair are adjacent
            x = x.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        if part == 'attn_qkv':
            for letter, third in zip('qkv', x.chunk(3)):
                weights[name.replace('qkv', letter)] = third
        else:
            weights[name] = x
    return weights

@pytest.fixture
def small_bpe():
    return some_tokenizer('gpt2', 'it was a cat, it was a hat, and that was that. ' * 9)

@parametrize('name', EXPORTED)
def test_a_gguf_file_holds_the_model_and_its_tokenizer(name, small_bpe):
    import gguf
    model = small_gpt(name, vocab_size=1100)
    write_gguf('m.gguf', model, small_bpe, [small_bpe.eot], 'float32')
    reader = gguf.GGUFReader('m.gguf')
    fields = {key: field.contents() for key, field in reader.fields.items()}

    c, kind = model.config, name.split()[0]
    assert fields['general.architecture'] == kind
    for key, ours in rows(FIELDS_OF_GGUF):
        assert fields[f'{kind}.{key}'] == pytest.approx(getattr(c, ours)), key
    want = model.state_dict()
    if c.tie_weights:
        del want['lm_head.weight']
    for key, x in weights_of_gguf(reader, kind, c).items():
        assert torch.equal(x, want.pop(key)[:1100]), key
    assert not want

    assert fields['tokenizer.ggml.model'] == 'gpt2'
    assert fields['tokenizer.ggml.pre'] == 'gpt-2'
    assert fields['tokenizer.ggml.merges'][:2] == small_bpe.as_json()[1]['merges'][:2] == ['a t', 'w a']
    assert len(fields['tokenizer.ggml.merges']) == len(small_bpe.merges)
    tokens, eot = fields['tokenizer.ggml.tokens'], small_bpe.eot
    assert len(set(tokens)) == 1100
    assert tokens[small_bpe.id_of[b' was']] == 'Ġwas'
    assert tokens[eot] == END_OF_TEXT
    assert fields['tokenizer.ggml.bos_token_id'] == fields['tokenizer.ggml.eos_token_id'] == eot
    assert fields['tokenizer.ggml.token_type'] == [1] * eot + [3] + [5] * (1099 - eot)  # normal, control, unused
    assert not fields['tokenizer.ggml.add_bos_token']

@parametrize('dtype, number', [('auto', 1), ('bfloat16', 30)])
def test_sample_writes_a_gguf_file_in_float16_or_as_it_is_asked(dtype, number, small_bpe):
    import gguf
    folder = save(small_gpt(vocab_size=300), eot=7)
    os.remove(folder / 'manifest.json')
    small_bpe.save(folder / 'tokenizer.json')
    run_main(sample, out_dir=str(folder), gguf='new/m.gguf', dtype=dtype)
    reader = gguf.GGUFReader('new/m.gguf')
    assert {len(tensor.shape): tensor.tensor_type for tensor in reader.tensors} == {1: 0, 2: number}
    assert reader.fields['tokenizer.ggml.eos_token_id'].contents() == 7

def test_what_gguf_has_no_form_for_is_refused(small_bpe):
    good, ablation = [small_gpt(name, vocab_size=300) for name in ('qwen3', 'no norm')]
    save_smollm()
    for model, tok in ((ablation, small_bpe), (good, byte_tokenizer()), (good, CharTokenizer(['a'])),
                       (good, load_tokenizer('t.json'))):
        with user_error('only a Llama'):
            write_gguf('m.gguf', model, tok, [], 'float32')
    assert not Path('m.gguf').exists()

# kind of model, unsupported setting, start of the error
UNLIKE = [
    ('Llama', dict(attention_bias=True), 'attention_bias = True'),
    ('Llama', dict(mlp_bias=True), 'attention_bias = False'),
    ('Qwen3', dict(use_sliding_window=True, sliding_window=8), 'use_sliding_window = True'),
]

@parametrize('kind, setting, says', UNLIKE)
def test_a_model_that_computes_something_else_is_refused_by_name(kind, setting, says):
    save_theirs(kind, **setting)
    with user_error(f'^{says}.* not supported'):
        load_model('theirs')

# file of a Llama | text in it | replacement
MISFITS = '''
config.json | "llama" | "mamba"
config.json | "silu" | "gelu"
config.json | "rope_theta" | "rope_scaling": {"type": "linear", "factor": 2}, "rope_theta"
config.json | "rope_theta" | "rope_scaling": {"type": "longrope", "long_factor": [1]}, "rope_theta"
config.json | "rope_theta" | "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}, "rope_theta"
config.json | "rope_theta" | "rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0}, "rope_theta"
config.json | layers": 2 | layers": 3
config.json | "sliding_window": null | "sliding_window": 8
config.json | heads": 4 | heads": 0
config.json | embeddings": | embeddings": -
config.json | "vocab_size": 50 | "vocab_size": 60
model.safetensors | embed_tokens | my_embedding
model.safetensors | { | [
'''

@parametrize('eos, ends', [([7, 9, 7], [2, 7, 9]), (-1, [2]), (None, [2]), ('700', [2])])
def test_only_ids_end_a_text(eos, ends):
    write('m/config.json', json.dumps(dict(eos_token_id=eos)))
    assert find_ends(Path('m'), 2) == ends

def test_an_older_file_beside_the_weights_is_not_read():
    model = small_gpt('llama')
    folder = save(model)
    for name in 'model_old.safetensors', 'model-00001-of-00001.safetensors', 'model.fp16.safetensors':
        zeros = {key: torch.zeros_like(x) for key, x in load_file(folder / 'model.safetensors').items()}
        save_file(zeros, folder / name)
    near_weights(load_model(folder), model, 0)

@parametrize('name, old, new', rows(MISFITS))
def test_a_folder_that_does_not_fit_is_one_error(name, old, new):
    folder = save(small_gpt('llama'))
    os.remove(folder / 'manifest.json')
    change(folder / name, old, new)
    with pytest.raises(UserError):
        load_model(folder)

# -----------------------------------------------------------------------------
# damaged checkpoints, and crashes while saving

def test_every_damage_to_a_checkpoint_is_named_and_the_older_one_is_used(capsys):
    older = save(small_gpt(), 'run/step_00000008')
    newer = save(small_gpt(), 'run/step_00000010')
    write(newer / 'README.md', 'license: mit')
    assert newest_intact('run') == newer
    assert 'run/step_00000010/README.md was changed or removed (its sha256 differs from ' in capsys.readouterr().err
    for path in sorted({*newer.iterdir()} - {newer / 'README.md'}):
        intact = path.read_bytes()
        changed = intact[:9] + b'?' + intact[10:]
        for data in intact[:-9], changed, None:      # truncated, changed, missing
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            assert newest_intact('run') == older
            *_, line = capsys.readouterr().err.splitlines()
            assert str(newer) in line
            if path.name != 'manifest.json':
                assert str(path) in line
                published = data is None and path.name.startswith('training.')      # only training needs this file
                with nullcontext() if published else user_error(path.name):
                    load_model(newer)
                assert find_folder('run') == (newer if published else older)
                capsys.readouterr()
        path.write_bytes(intact)
    assert newest_intact('run') == newer

class Killed(BaseException):
    """Stands for kill -9: `except Exception` does not catch it. A real kill also leaves an unfinished folder."""

def fail_at(moment, error, patch):
    """Raises an error in place of one call by which a save changes the disk."""
    calls = itertools.count()

    def failing(function):
        def call(*args, **options):
            if next(calls) == moment:
                raise error
            return function(*args, **options)
        return call

    for name in 'os.mkdir', 'os.rename', 'os.fsync', 'shutil.copyfile', 'pathlib.Path.write_text', 'model.save_file':
        patch.setattr(name, failing(pkgutil.resolve_name(name)))

@parametrize('error', [Killed(), OSError(28, 'No space left on device')])
def test_a_crash_at_any_point_of_a_save_leaves_the_old_checkpoint_or_the_new_one(error, monkeypatch):
    model = small_gpt()
    run = save(model, 'run/step_00000001').parent
    seen, saved = [], False
    while not saved:
        with monkeypatch.context() as patch:
            fail_at(len(seen), error, patch)
            try:
                saved = save(model, run / 'step_00000002')
            except Killed:
                (run / '.step_00000002.partial').mkdir()
            except OSError:
                assert not [*run.glob('.*')]
        newest = newest_intact(run)
        load_model(newest)
        seen.append(newest.name)
        shutil.rmtree(run / 'step_00000002', ignore_errors=True)
    assert seen == sorted(seen)
    assert seen.count('step_00000001') > 10

def test_a_checkpoint_that_is_half_removed_is_seen_no_more(monkeypatch):
    folder = save(small_gpt(), 'run/step_00000001')

    def interrupted(folder, **options):
        if folder.exists():
            raise Killed

    monkeypatch.setattr('shutil.rmtree', interrupted)
    with pytest.raises(Killed):
        remove_checkpoint(folder)
    assert not checkpoints('run')

def test_files_are_on_the_disk_before_they_get_their_name_and_the_name_after(monkeypatch):
    synced = set()
    rename = os.rename

    def checking_rename(a, b):
        for path in a, *a.iterdir():
            assert path.stat().st_ino in synced, path
        synced.clear()
        rename(a, b)

    monkeypatch.setattr('os.fsync', lambda fd: synced.add(os.fstat(fd).st_ino))
    monkeypatch.setattr('os.rename', checking_rename)
    folder = save(small_gpt(), 'run/step_00000001')
    assert folder.parent.stat().st_ino in synced

# a hub on this machine: the folder hub/<name> is the model me/<name>

def copy_wanted(repo, **wanted):
    """Replaces huggingface_hub.snapshot_download: copies the wanted files to cache/."""
    there, here = Path('hub', repo.split('/')[1]), Path('cache', repo)
    here.mkdir(parents=True, exist_ok=True)
    for name in huggingface_hub.utils.filter_repo_objects(os.listdir(there), **wanted):
        shutil.copy(there / name, here)
    return here

@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr('huggingface_hub.snapshot_download', copy_wanted)

def put_on_hub(name):
    """Puts a model on the hub: our checkpoint, or one that transformers saved in several files."""
    if name == 'ours':
        save(small_gpt(vocab_size=257), 'hub/ours', eot=256)
        return
    save_theirs('Llama', vocab_size=600).save_pretrained(f'hub/{name}', max_shard_size='100KB')
    save_llama2()
    os.rename('t.json', f'hub/{name}/tokenizer.json')
    Path(f'hub/{name}/pytorch_model.bin').touch()

@parametrize('name', ['ours', 'theirs'])
def test_a_model_of_the_hub_is_downloaded_and_generates(name, hub, printed):
    put_on_hub(name)
    texts = []
    for out_dir in f'hub/{name}', f'me/{name}':
        run_main(sample, out_dir=out_dir, num_samples=1, max_new_tokens=5, start='a')
        texts.append(printed())
    assert texts[0] == texts[1]
    wanted = r'model.*\.safetensors(.index.json)?|(?!manifest|training|model).*\.json'
    needed = {file for file in os.listdir(f'hub/{name}') if re.fullmatch(wanted, file)}
    assert {*os.listdir(f'cache/me/{name}')} == needed

def test_a_wrong_name_of_a_model_is_one_error_before_weights_are_downloaded(hub):
    put_on_hub('other')
    change('hub/other/config.json', '"llama"', '"mamba"')
    for name, says in ('me/none', 'the hub does not'), ('gpt2', 'the hub does not'), ('me/other', 'mamba'):
        with user_error(says):
            find_folder(name)
    assert not [*Path('cache/me/other').glob('*.safetensors')]

def test_a_run_in_its_first_steps_says_that_it_has_no_checkpoint_yet():
    write('r/log.jsonl')
    with user_error('no checkpoint yet'):
        find_folder('r')

# -----------------------------------------------------------------------------
# device, dtype and compiler, chosen by what torch reports

@parametrize('gpus, mps, want', [(2, False, 'cuda:1'), (0, True, 'mps')])
def test_the_device_is_what_there_is(gpus, mps, want, monkeypatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: gpus)
    monkeypatch.setattr('torch.backends.mps.is_available', lambda: mps)
    assert choose_device('auto', local_rank=1) == want
    with user_error('cuda:2 is not available'):
        choose_device('cuda:2')

@parametrize('version, says', [(None, True), ('12.6', False)])
def test_a_torch_for_cpus_is_named_where_an_nvidia_gpu_is(version, says, monkeypatch, capsys):
    monkeypatch.setattr('torch.version.cuda', version)
    monkeypatch.setattr('shutil.which', lambda name: None)
    choose_device('auto')
    assert not capsys.readouterr().err
    monkeypatch.setattr('shutil.which', lambda name: name == 'nvidia-smi')
    assert choose_device('auto') == 'cpu'
    assert ('this torch is a CPU build' in capsys.readouterr().err) == says
    with user_error('cuda:0 is not available .found: cpu.*or a GPU build of torch'):
        choose_device('cuda')

# device | what it has, 'text' if it generates, 'compiled' if compiled | dtype
TYPES = '''
cuda:0 | bfloat16 | bfloat16
cuda:0 | nothing | float16
cpu | GenuineIntel avx512_bf16 amx_bf16 | bfloat16
cpu | AuthenticAMD avx512_bf16 | bfloat16
cpu | GenuineIntel avx512_bf16 | float32
cpu | AuthenticAMD avx2 | float32
cpu | AuthenticAMD avx512_bf16 FBGEMM text | float16
cpu | AuthenticAMD avx512_bf16 text | bfloat16
cpu | AuthenticAMD avx512_bf16 FBGEMM | bfloat16
cpu | other text compiled | float32
'''

@parametrize('device, there, want', rows(TYPES))
def test_a_type_is_used_only_where_it_is_fast(device, there, want, monkeypatch):
    write('cpuinfo', there)
    monkeypatch.setattr('model.has_fast_bfloat16', lambda: has_fast_bfloat16('cpuinfo'))
    monkeypatch.setattr('model.can_pack', lambda device: 'FBGEMM' in there)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda **options: 'bfloat16' in there)
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda device: (7, 0))
    assert choose_dtype('auto', device, 'text' in there, 'compiled' in there) == want
    assert not has_fast_bfloat16('missing')

# device | what it lacks | whether it can compile. On a CPU, torch 2.6 compiles the embedding's gradient wrongly.
TOOLS = '''
cpu | triton | yes
cpu | g++ | no
cpu | Python.h | no
cuda:0 | torch 2.10 | yes
cuda:0 | g++ | no
cuda:0 | Python.h | no
cuda:0 | triton | no
'''

@parametrize('device, lacks, can', rows(TOOLS))
def test_compiling_needs_its_tools_and_enough_to_do(device, lacks, can, monkeypatch, tmp_path):
    def find(name):
        return None if name in lacks else name

    monkeypatch.setattr('model.find_spec', find)
    monkeypatch.setattr('shutil.which', find)
    monkeypatch.setattr('sysconfig.get_path', lambda name: tmp_path)
    if lacks != 'Python.h':
        (tmp_path / 'Python.h').touch()
    assert choose_compile('auto', device, flops=1e18) == (can == 'yes')
    for fast in True, False:        # without fast bfloat16, compiling pays sooner
        monkeypatch.setattr('model.has_fast_bfloat16', lambda: fast)
        assert choose_compile('auto', device, flops=2e13) == (can == 'yes' and device == 'cpu' and not fast)
    for flops in 4e15, 6e15:
        assert choose_compile('auto', device, flops) == (can == 'yes' and (device == 'cpu' or flops > 5e15))
    if can == 'yes':
        assert choose_compile(True, device)
    else:
        with user_error('compiler'):
            choose_compile(True, device)

# name of a card | dense bf16 TFLOP/s (0: unknown)
CARDS = '''
NVIDIA H100 80GB HBM3 | 989
NVIDIA A100-SXM4-40GB | 312
NVIDIA A100-SXM4-40GB MIG 1g.5gb | 0
NVIDIA A10G | 70
NVIDIA RTX A6000 | 154.8
NVIDIA RTX 6000 Ada Generation | 364.2
NVIDIA GH200 480GB | 989
NVIDIA H200 NVL | 835
AMD Instinct MI300X | 1307
NVIDIA L40S | 362
NVIDIA GeForce RTX 3090 | 71
NVIDIA GeForce RTX 3090 Ti | 0
NVIDIA GeForce RTX 4090 D | 0
NVIDIA GeForce RTX 4090 Laptop GPU | 0
'''

def test_the_peak_of_a_card_is_known_by_its_name(monkeypatch):
    for name, peak in rows(CARDS):
        monkeypatch.setattr('torch.cuda.get_device_name', lambda device: name)
        assert peak_flops('cuda:0') == float(peak) * 1e12

# -----------------------------------------------------------------------------
# prepare.py

class Prepared:
    """Runs prepare.py with these options in this process, and holds its results."""
    def __init__(self, dataset, **options):
        self.folder = run_main(prepare, dataset=dataset, **options)
        self.meta = prepare.read_meta(self.folder)
        self.tok = load_tokenizer(self.folder / 'tokenizer.json')
        self.train, self.val = self.ids('train'), self.ids('val')
        assert self.meta['ids'] == max(self.train + self.val) + 1
        self.train_texts, self.val_texts = self.texts(self.train), self.texts(self.val)

    def shards(self, split):
        return Shards(self.folder, split, self.meta, self.tok)

    def ids(self, split):
        return self.shards(split).read(0, self.meta[split]['tokens']).tolist()

    def texts(self, ids):
        """Returns the documents of a split."""
        return self.tok.decode(ids).split(END_OF_TEXT)

prepare_bytes = partial(Prepared, tokenizer='byte')        # fast, because it learns nothing

def data_folder(name):
    [folder] = Path('data').glob(f'{name}-????????')
    return folder

def left():
    """Lists data/, except for downloads and locks."""
    return [path.name for path in Path('data').glob('*') if not re.search('downloads|lock', path.name)]

def small_blocks(monkeypatch):
    monkeypatch.setattr('prepare.BLOCK', 4096)
    monkeypatch.setattr('tokenizer.BLOCK', 4096)

def test_every_form_of_the_same_documents_gives_the_same_shards(monkeypatch):
    import pyarrow.parquet
    small_blocks(monkeypatch)
    texts = [text for text in CODE.split('\n\n') if text.strip()]
    raw = END_OF_TEXT.join(texts).encode()
    objects = [dict(body=text, id=i) for i, text in enumerate(texts)]
    lines = ('\n\n' + '\n'.join(map(json.dumps, objects))).encode()
    forms = {'a.txt': raw, 'b.txt.gz': raw, 'c.TXT.XZ': raw, 'd.jsonl': lines, 'e.ndjson.zst': lines, 'f.json': lines,
             'g.json.bz2': json.dumps(objects, indent=1).encode(), 'h.txt': '\ufeff'.encode() + raw}
    for name, data in forms.items():
        module = importlib.import_module(prepare.COMPRESSIONS.get(Path(name.lower()).suffix, 'io'))
        with module.open(name, 'wb') as file:
            file.write(data)
    for name, delimiter in ('i.csv', ','), ('j.tsv', '\t'):
        with open(name, 'w', newline='', encoding='utf-8-sig') as file:
            csv.writer(file, delimiter=delimiter).writerows([['id', 'body'], *enumerate(texts)])
    for i, text in enumerate(texts):
        write(f'k.d/{i:04d}.txt', text)
        write(f'l.d/{i // 99}/{i:04d}.json', json.dumps(dict(body=text)))
    pyarrow.parquet.write_table(pyarrow.table(dict(id=range(len(texts)), body=texts)), 'm.parquet', row_group_size=100)
    found = []
    for path in [*sorted(map(str, Path('.').glob('?.*'))), 'k.d/*.txt', f'{os.getcwd()}/k.d/**', './l.d/*/*.json']:
        data = Prepared(path, text_field='body', vocab_size=320)
        found.append([data.tok.merges, data.train, data.val])
    assert len(found) == 16 and all(one == found[0] for one in found)
    assert sorted(data.texts(data.train + data.val)) == sorted(texts)

# text | separator as typed
SEPARATORS = r'''
a\nb\nc | \n
a\r\nb\r\nc | \n
a\n\nb\n\nc | \n\n
a\r\n\r\nb\r\n\r\nc\r\n | \n\n
a\tb\tc | \t
a\n--\nb\r\n--\r\nc | \n--\n
'''

@parametrize('text, typed', rows(SEPARATORS))
def test_a_separator_is_found_with_either_line_ends_and_as_it_is_typed(text, typed):
    write('s.txt', text.encode().decode('unicode_escape'))
    data = prepare_bytes('corpus.txt', separator=typed, val_dataset='s.txt')
    assert [text.strip('\r\n') for text in data.val_texts] == ['a', 'b', 'c']

def test_a_byte_order_mark_is_no_text():
    for name in 'a.jsonl', 'b.json', 'c.csv', 'd.txt':
        form = dict(jsonl='{"text": "%s"}\n', json='[{"text": "%s"}]', csv='text\n%s\n').get(name.split('.')[1], '%s')
        Path(name).write_bytes((form % 'déjà\u2028\ufeffvu 😀').encode('utf-8-sig'))
        assert prepare_bytes('corpus.txt', val_dataset=name).val_texts == ['déjà\u2028\ufeffvu 😀']

def test_null_and_blank_texts_are_no_documents():
    write('a.jsonl', '{"text": null}\n{"text": "a"}\n{"text": ""}\n\n{"text": " \\n"}\n{"text": "b"}\n')
    write('d/0.txt', '')
    write('d/1.txt', '', ' \n', 'c')
    data = prepare_bytes('d', val_dataset='a.jsonl')
    assert [data.train_texts, data.val_texts] == [['c'], ['a', 'b']]

def test_a_text_without_separators_is_never_in_memory_as_a_whole(monkeypatch):
    small_blocks(monkeypatch)
    write('a.txt', 'word ' * 20_000)
    write('b.txt', 'more ' * 20_000)
    files = [Path('a.txt'), Path('b.txt')]
    for val_files, sizes in ([], (180_001, 20_001)), (files, (200_002, 200_002)):
        parts = [*prepare.split_texts(files, val_files, '', 0.1, 'reading')]
        assert max(len(part) for _, part in parts) < 10_000
        assert sizes == tuple(sum(len(part) for name, part in parts if name == split) for split in ('train', 'val'))

# files of a folder for training | for validation | left out
SPLIT_FILES = '''
train.txt | validation.txt | test.txt
wiki.train.tokens | wiki.valid.tokens | wiki.test.tokens
data/train-00000-of-00001.jsonl | data/validation-00000-of-00001.jsonl | data/test-00000-of-00001.jsonl
contest.txt devil.txt values.txt | val.txt | new-test/a.txt train-test.txt
model.py sample.py train.py utils.py | dev.txt | test.py
a.txt~ test-train.txt | VAL1.txt | x_TEST/e.txt
Homework_ödev.txt a.txt | b-DEV-1.txt.gz | test.txt
train/a.txt train/test/train.txt | train/a/Dev.txt | dev/test/x.txt
'''

@parametrize('train, val, out', rows(SPLIT_FILES))
def test_words_in_the_paths_of_files_say_for_which_split_they_are(train, val, out, printed):
    train, val, out = train.split(), val.split(), out.split()
    for name in [*train, *val, *out, '.hidden.txt', '.git/x.txt', 'README', 'b/README.md', 'LICENSE.txt']:
        path = Path('my-test/val', name)            # words above the folder do not count
        path.parent.mkdir(parents=True, exist_ok=True)
        with (gzip if name.endswith('.gz') else io).open(path, 'wt', encoding='utf-8') as file:
            file.write(json.dumps(dict(text=name)) if '.json' in name else name)
    for dataset in 'my-test/val', 'my-test/val/**':
        data = prepare_bytes(dataset)
        assert [data.train_texts, data.val_texts] == [train, val]
        sizes = rf'training: {len(train)} file.*\nvalidation: 1 file, .*\nleft out: {len(out)} file'
        assert re.search(sizes, printed())
        shutil.rmtree('data')
    data = prepare_bytes(str(path.with_name('LICENSE.txt')))        # asked for by name
    assert data.tok.decode(data.train + data.val) == 'LICENSE.txt'

# --dataset | --val_dataset | files for training | for validation
HELD_OUT = '''
d | d/test.txt | more train | test
d | v.txt | more train | v
d/*r* | d/[tv]* | more | test train val
d | d/../d/t* | more | test train
'''

@parametrize('dataset, val_dataset, train, val', rows(HELD_OUT))
def test_what_is_in_val_dataset_is_not_trained_on(dataset, val_dataset, train, val, printed):
    for name in 'd/train', 'd/more', 'd/val', 'd/test', 'v':
        write(f'{name}.txt', Path(name).name)
    data = prepare_bytes(dataset, val_dataset=os.path.abspath(val_dataset))
    assert [data.train_texts, data.val_texts] == [train.split(), val.split()]
    left_out = f'left out: 2 files, first {Path("d/test.txt")}'
    assert (dataset == 'd') == (left_out in printed())

def test_a_folder_of_rows_and_other_files_is_refused_and_patterns_choose():
    for name in 'a.py', 'b/c.py', 'b/[d].py', 'b/data.csv':
        write(f'code/{name}', f'text\n{name}\n')
    for dataset in 'code', 'code/**', 'code/**/*':
        with user_error(r'has rows \(b/data.csv\) and other files \(b/c.py\); choose one kind with a pattern'):
            find_or_prepare(dataset, 'byte')
    chosen = {'code/**/*.py': ['a.py', 'b/[d].py', 'b/c.py'], 'code/b/*.py': ['b/[d].py', 'b/c.py'],
              'code/b/[d].py': ['b/[d].py'], 'code/?/*v': ['b/data.csv'], 'code/b/[cd]*v': ['b/data.csv']}
    for dataset, names in chosen.items():
        data = prepare_bytes(dataset, val_dataset='corpus.txt')
        assert [text.split()[-1] for text in data.train_texts] == names
    assert len(prepare_bytes('code', val_dataset='corpus.txt', text_field='').train_texts) == 4
    with user_error("no text at 'code/[*].md'; use another path, or python, .*a comment in the config.py"):
        find_or_prepare('code/*.md', 'byte')

@not_windows
def test_links_to_files_are_read_and_links_to_folders_are_not_followed():
    write('d/a/b.txt', 'once')
    write('elsewhere/c.txt', 'never')
    for target, link in ('.', 'd/self'), ('../../d', 'd/a/up'), ('../elsewhere', 'd/more'), ('a/b.txt', 'd/z.txt'):
        os.symlink(target, link)
    for dataset in 'd', 'd/**', 'd/**/*.txt':
        assert prepare_bytes(dataset, val_dataset='corpus.txt').train_texts == ['once', 'once']

def test_the_standard_library_is_read_without_its_tests_and_packages_and_once(monkeypatch):
    data = prepare_bytes('python')
    modules = json, shutil, re, pytest, importlib.import_module('encodings.utf_8')
    texts = [Path(module.__file__).read_text('utf-8') for module in modules]
    assert [text in data.train_texts + data.val_texts for text in texts] == [True, True, True, False, False]
    monkeypatch.setattr('prepare.find_splits', None)            # so no file is looked at
    assert find_or_prepare('python', 'byte') == data.folder
    monkeypatch.setitem(prepare.DATASETS['python'], 'source', 'Python 2.7')
    with pytest.raises(TypeError):
        find_or_prepare('python', 'byte')

def test_a_data_set_has_the_name_of_its_file_or_folder_without_suffixes():
    names = {'a/books.txt.xz': 'books', '2024.01.02.txt': '2024_01_02', 'v1.5/': 'v1_5', '.history': 'history',
             'wiki.train.tokens': 'wiki', 'my text.txt': 'my_text', 'my/code/**/*.py': 'code', 'books/a-?.txt': 'books'}
    assert [*map(prepare.data_name, names)] == [*names.values()]

def test_a_data_set_of_the_hub_is_downloaded_once_and_keeps_its_own_split(monkeypatch):
    for split in 'train', 'valid':
        write(f'dataset/TinyStoriesV2-GPT4-{split}.txt', 50 * f'A {split} story.\n{END_OF_TEXT}\n')
    os.mkdir('model')
    byte_tokenizer().save('model/tokenizer.json')

    def download(repo, name, repo_type, local_dir):
        assert repo in ('roneneldan/TinyStories', 'openai-community/gpt2')
        os.rename(Path(repo_type, name), local_dir / name)

    monkeypatch.setattr('huggingface_hub.hf_hub_download', download)
    for _ in range(2):
        data = Prepared('tinystories', tokenizer='gpt2')
        assert [text.split()[1] for text in data.train_texts + data.val_texts] == ['train'] * 50 + ['valid'] * 50
        with patch('prepare.find_splits', None):        # so no file is looked at
            assert find_or_prepare('tinystories', 'gpt2') == data.folder
        shutil.rmtree(data.folder)

def test_a_file_of_the_web_is_taken_only_with_its_sha256(monkeypatch):
    there, text = Path('there.txt'), b'emma\nolivia\n' * 50
    known = dict(prepare.DATASETS['names'], url=there.resolve().as_uri())
    monkeypatch.setitem(prepare.DATASETS, 'names', known)
    for _ in range(2):
        with user_error('put the file at data.downloads.names.txt by hand.*--dataset=python'):
            find_or_prepare('names', 'char')
        assert left() == []
        there.write_bytes(text)         # it was missing; now its text is wrong
    known['sha256'] = hashlib.sha256(text).hexdigest()
    assert {*Prepared('names', tokenizer='char').train_texts} == {'emma', 'olivia'}

def test_documents_keep_their_text_and_stay_on_their_side_of_the_split():
    texts = sorted(f'document {i}' for i in range(200))
    write('c.txt', '\n'.join([*texts, '  ', '']))         # blank ones are dropped
    data = Prepared('c.txt', vocab_size=300, separator='\\n')
    assert sorted(data.train_texts + data.val_texts) == texts
    assert 5 <= len(data.val_texts) <= 40
    write('d.txt', *texts, 'one more')
    assert {*data.val_texts} <= {*Prepared('d.txt', vocab_size=300).val_texts}

@parametrize('parts', [1, 3])
def test_few_documents_are_split_by_position(parts, monkeypatch):
    small_blocks(monkeypatch)
    text = CODE[:30_000]
    write('c.txt', *parts_of(text, len(text) // parts))
    data = Prepared('c.txt', vocab_size=400, workers=2)
    train = data.tok.decode(data.train)
    assert (train.replace(END_OF_TEXT, ''), train.count(END_OF_TEXT)) == (text[:27_000], parts - 1)
    assert data.val_texts == [text[27_000:]]
    assert data.train == data.tok.encode(train)     # as if there were no blocks

def test_a_large_vocabulary_takes_four_bytes_an_id():
    n = 1 << 16         # with end-of-text, one too many for two bytes
    chars = map(chr, range(1 << 16, (1 << 16) + n))
    write('c.txt', ''.join(chars))
    data = Prepared('c.txt', tokenizer='char')
    assert data.meta['dtype'] == '<u4'
    assert data.train + data.val == [*range(n)]

@parametrize('kind, vocab_size', [('word', 259), ('bpe', 300)])
def test_a_tokenizer_learns_from_training_text_alone(kind, vocab_size):
    write('c.txt', 'aa bb b ' * 900 + 'zzz é ' * 130)
    data = Prepared('c.txt', tokenizer=kind, vocab_size=vocab_size)
    tokens = [*data.tok.vocab.values()]
    assert b'zz' not in tokens and b' zzz' not in tokens
    if kind == 'word':
        assert {token for token in tokens if len(token) > 1} == {b' aa', b' bb', END_OF_TEXT.encode()}
    shards = data.shards('val')
    assert shards.text_bytes([0], len(shards) - 1) == data.meta['val']['bytes'] - len(data.tok.vocab[data.val[0]])

def test_ids_that_begin_or_end_a_document_have_no_bytes_of_text():
    save_llama2()
    write('v.txt', 'one', 'two')
    data = Prepared('corpus.txt', tokenizer='t.json', val_dataset='v.txt')
    shards = data.shards('val')
    assert data.val[0] in data.tok.opening
    assert shards.text_bytes([0], len(shards) - 1) == len(data.tok.decode_bytes(data.tok.encode('one'))) * 2

def test_the_summary_says_what_can_be_counted_by_hand(printed):
    write('c.txt', *[f'le café {i} ' + 'déjà vu ' * (i % 7 + 1) for i in range(200)])
    data = Prepared('c.txt', vocab_size=300)
    size, n = sum(len(text.encode()) for text in data.val_texts), len(data.val)
    row = f'val | {len(data.val_texts)} documents | {size:,} bytes | {n:,} tokens | {size / n:.2f} bytes per token'
    assert f'\n{row}\n' in re.sub(' +', ' ', printed())
    prepare_bytes('c.txt', separator='')
    assert re.search('train *[|] 1 document [|].*\nval *[|] 1 document [|]', printed())

def test_a_second_run_finds_the_folder_and_another_text_or_option_makes_another(monkeypatch):
    folder = find_or_prepare('corpus.txt', 'byte')
    monkeypatch.setattr('prepare.make_folder', lambda folder, *_: folder.mkdir())
    for path in './corpus.txt', f'{os.getcwd()}/corpus.txt':
        assert find_or_prepare(path, 'byte') == folder
    found = [folder, *[find_or_prepare('corpus.txt', 'bpe', n) for n in (300, 301)]]
    options = dict(separator='x', val_fraction=0.2, pattern='gpt4', val_dataset='corpus.txt', text_field='a')
    for name, value in options.items():
        with patch(f'prepare.{name}', value):
            found.append(find_or_prepare('corpus.txt', 'byte'))
    for special in [END_OF_TEXT], ['<x>', END_OF_TEXT]:
        byte_tokenizer(special).save('t.json')
        found.append(find_or_prepare('corpus.txt', 't.json'))
    for text in '', 'x':
        write('corpus.txt', Path('corpus.txt').read_text() + text)
        os.utime('corpus.txt', (1, 1))          # an older file may also hold another text
        found.append(find_or_prepare('corpus.txt', 'byte'))
    write('d/a', 'some text')
    for old, new in 'aa', 'ab', ('b', 'val'):           # the same text, another name and another split
        os.rename(f'd/{old}', f'd/{new}')
        found.append(find_or_prepare('d', 'byte'))
    monkeypatch.setattr('prepare.FORMAT', 0)
    found.append(find_or_prepare('d', 'byte'))
    assert len({*found}) == len(found) == 16
    os.unlink('corpus.txt')
    assert find_or_prepare(str(folder), 'byte') == folder           # its tokens are enough

def start(*args):
    return subprocess.Popen([sys.executable, HERE / 'prepare.py', *args], stdout=subprocess.PIPE, text=True)

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def test_prepare_that_was_killed_gives_the_same_shards_when_run_again():
    write('corpus.txt', *[CODE[i:] for i in range(0, len(CODE), 700)])
    args = '--dataset=corpus.txt', '--vocab_size=400'
    assert start(*args).wait() == 0
    folder = data_folder('corpus-bpe400')
    expected = contents(folder)
    shutil.rmtree(folder)
    process = start(*args)
    while not any(Path('data').rglob('train_*.bin')):       # until it starts writing
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not folder.exists() or contents(folder) == expected
    assert start(*args).wait() == 0
    assert contents(folder) == expected and left() == [folder.name]

@not_windows
def test_a_disk_that_fills_up_is_one_line():
    write('small_disk.py', 'import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n')
    done = launch(HERE / 'prepare.py', '--dataset=corpus.txt', '--tokenizer=byte', 'small_disk.py', status=2)
    assert re.match('error: .*; make room', done.stderr.strip())
    assert left() == []

def test_two_prepares_at_once_make_one_new_folder():
    processes = [start('--dataset=corpus.txt', '--vocab_size=1000') for _ in range(2)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum('preparing' in text for text in printed) == 1
    prepare.read_meta(data_folder('corpus-bpe1000'))

@parametrize('package, file', [('pyarrow', 'a.parquet'), (prepare.COMPRESSIONS['.zst'], 'a.txt.zst')])
def test_a_format_that_needs_a_package_names_it(package, file, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    monkeypatch.setitem(sys.modules, prepare.COMPRESSIONS['.zst'], None)
    write(file, 'nothing')
    assert refusal(f'prepare.py --dataset={file}').endswith(f'run: pip install {package}')

def test_small_shards_are_read_as_one_array(monkeypatch):
    small_blocks(monkeypatch)
    whole = Prepared('corpus.txt', vocab_size=300)
    cut = Prepared('corpus.txt', vocab_size=300, shard_tokens=777)
    assert [cut.train, cut.val] == [whole.train, whole.val]
    *sizes, _ = [shard['tokens'] for shard in cut.meta['train']['shards']]
    assert {*sizes} == {777}
    for start in 770, 776, 777:
        assert cut.shards('train').read(start, 1600).tolist() == whole.train[start:start + 1600]

def test_a_shard_that_is_damaged_is_refused_when_it_is_read():
    data = Prepared('corpus.txt', vocab_size=400, shard_tokens=9000)
    shards, file = data.shards('train'), data.folder / 'train_001.bin'
    ids = np.fromfile(file, np.uint16)
    ids[50] = 400
    ids.tofile(file)
    assert shards.batch([9000, 9051], 16)[0].tolist() == [data.train[9000:9016], data.train[9051:9067]]
    with user_error('has the id 400, but all ids should be below 400; copy or prepare'):
        shards.batch([9000, 9040], 16)
    for bad in ids.tobytes() + b'\0\0', ids.tobytes()[:-1], ids[:500].tobytes():
        file.write_bytes(bad)
        with user_error('train_001.bin has .* bytes, but 9,000 tokens.; copy it again, or'):
            prepare.read_meta(data.folder)
    assert len(shards.read(8900, 600)) == 600
    for start, length in (9400, 200), (9600, 10), (8900, 1200):
        with user_error('train_001.bin has become shorter'):
            shards.read(start, length)
    file.unlink()
    with user_error('No such file.*train_001.bin'):
        prepare.read_meta(data.folder)

def test_every_sequence_comes_once_per_epoch_and_each_time_in_another_order():
    n = 61          # sequences; the other 24 tokens are for the shift and the last target
    starts = partial(Shards.starts, range(1000), T=16)
    row = starts(0, 3 * n, seed=1)
    epochs = parts_of(row, n)
    for epoch in epochs:
        assert sorted(epoch) == [*range(min(epoch), min(epoch) + n * 16, 16)]
        assert 0 <= min(epoch) and max(epoch) + 16 < 1000
    assert epochs[0] != epochs[1] != epochs[2] and len({*map(min, epochs)}) > 1
    assert starts(0, n, seed=2) != epochs[0]
    assert starts(n - 3, 7, seed=1) == row[n - 3:n + 4]
    assert row[:6] == [47, 79, 383, 863, 431, 959], 'runs of earlier versions cannot be resumed'

def test_a_folder_of_nanogpt_has_the_vocabulary_of_its_tokenizer_or_of_its_largest_id():
    os.mkdir('ids')
    for largest, vocab_size, eot in (50_256, 50_257, 50_256), (60_000, 60_001, None), (64, 65, None), (64, 68, None):
        for split, last in ('train', largest), ('val', 1):
            np.array([0, last], '<u2').tofile(f'ids/{split}.bin')
        meta = prepare.read_meta(Path('ids'))
        assert (meta['vocab_size'], meta['ids'], meta['eot']) == (vocab_size, vocab_size, eot)
        CharTokenizer(map(chr, range(67))).save('ids/tokenizer.json')
        if largest > 64:
            os.remove('ids/tokenizer.json')
    os.remove('ids/val.bin')
    with user_error('cannot train on ids .*val.bin.*; copy it again, or if'):
        prepare.read_meta(Path('ids'))
# -----------------------------------------------------------------------------
# train.py: optimizers, compared with torch's, and the schedule

def near(ours, theirs, error):
    """Checks that numbers or tensors differ by at most `error`."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    close(ours, theirs, rtol=0, atol=error, check_dtype=False)

def two_models(**fields):
    """Returns two small models with the same weights."""
    ours = GPT(GPTConfig(**{**fields, **SMALL}))
    return ours, twin(ours)

def near_weights(ours, theirs, error):
    for p, q in zip(ours.parameters(), theirs.parameters()):
        near(p, q, error)

def draw_gradients(ours, plain):
    """Sets the same new random gradients in two models."""
    for p, q in zip(ours.parameters(), plain.parameters()):
        q.grad = 0.1 * torch.randn_like(q)
        if p.grad is None:
            p.grad = torch.zeros_like(q)
        p.grad.copy_(q.grad)

TORCHS = dict(
    sgd=optim.SGD,
    momentum=partial(optim.SGD, momentum=0.9),
    adagrad=partial(optim.Adagrad, eps=1e-3),
    rmsprop=partial(optim.RMSprop, alpha=0.99, eps=1e-3),
    adam=partial(optim.Adam, betas=(0.9, 0.99), eps=1e-3),
    adamw=partial(optim.AdamW, betas=(0.9, 0.99), eps=1e-3),
)

def torchs(rule, params):
    """Returns torch's own optimizer, with weight decay only for matrices."""
    groups = [dict(params=p, weight_decay=0.1 if p.dim() > 1 else 0.0) for p in params]
    return TORCHS[rule](groups, lr=0.0)

def step_at(optimizer, lr):
    for group in optimizer.param_groups:
        group['lr'] = lr
    optimizer.step()

@parametrize('rule, compiled', [
    *itertools.product(TORCHS, [False]),
    pytest.param('adamw', True, marks=needs_compiler),
])
def test_every_rule_is_torchs_with_clipping_and_decay_of_matrices_alone(rule, compiled):
    ours, plain = two_models(**GPT2)
    optimizer = make_optimizer(ours, rule, adam_eps=1e-3, adamw_scale=9.0)         # adamw_scale affects only muon
    theirs = torchs(rule, plain.parameters())
    if compiled:
        optimizer.compile()
    for step in range(60):
        draw_gradients(ours, plain)
        max_norm = [0.5, 100.0, 0.0][step % 3]
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm or 1e9)
        near(optimizer.clip(max_norm), norm, 1e-4)
        lr = 3e-3 * (1 - step / 60)
        optimizer.step(lr)
        step_at(theirs, lr)
    near_weights(ours, plain, 2e-7)

@torch.no_grad()
def plain_muon(p, m, lr):
    """Updates one matrix p, with momentum m, by a step of Muon."""
    m.mul_(0.95).add_(0.05 * p.grad)
    x = 0.05 * p.grad + 0.95 * m
    x = x / x.norm()
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x - 4.7750 * s @ x + 2.0315 * s @ s @ x
    p.mul_(1 - lr * 0.1)
    p.sub_(lr * 0.2 * max(p.shape) ** 0.5 * x)

@parametrize('rule', ['muon', *TORCHS])
def test_a_frozen_weight_stays_as_it_is_under_every_rule(rule):
    model = small_gpt()
    frozen = {'model.layers.0.mlp.up_proj.weight', 'model.layers.1.input_layernorm.weight', 'model.embed_tokens.weight'}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    before = {name: w.clone() for name, w in model.named_parameters()}
    optimizer = make_optimizer(model, rule)
    model(random_ids(2, 8), random_ids(2, 8)).backward()
    optimizer.step(0.1)
    same = {name for name, w in model.named_parameters() if torch.equal(w, before[name])}
    assert same >= frozen and not any('lm_head' in name for name in same)

def test_an_embedding_keeps_its_rate_beside_a_frozen_head():
    model = small_gpt()
    model.lm_head.weight.requires_grad_(False)
    _, tables, *_ = make_optimizer(model, 'muon').groups
    assert tables.names == ['model.embed_tokens.weight']

@parametrize('compiled', [False, pytest.param(True, marks=needs_compiler)])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_others(compiled):
    ours, plain = two_models(n_kv_head=2, d_ff=48, bias=True, value_embeds=True)
    optimizer = make_optimizer(ours, 'muon', adam_eps=1e-3, adamw_scale=2.0, embed_scale=3.0)
    if compiled:
        optimizer.compile()
    matrices, tables, others = [], [], []
    for name, p in plain.named_parameters():
        if 'embed_' in name:
            tables.append(p)
        elif 'layers' in name and p.dim() > 1:
            matrices.append((p, torch.zeros_like(p)))
        else:
            others.append(p)
    adamw = TORCHS['adamw'](others, weight_decay=0.0)
    embedding = TORCHS['adamw'](tables, weight_decay=0.0)
    for _ in range(6):
        draw_gradients(ours, plain)
        optimizer.step(0.01)
        step_at(adamw, 0.02)
        step_at(embedding, 0.03)
        for p, m in matrices:
            plain_muon(p, m, 0.01)
    near_weights(ours, plain, 1e-5)

def test_a_new_layer_with_stacked_matrices_is_trained_as_matrices_and_its_flops_are_not_guessed():
    model = small_gpt()
    model.model.layers[0].mlp.experts = torch.nn.Linear(1, 1, bias=False)
    model.model.layers[0].mlp.experts.weight = torch.nn.Parameter(torch.randn(3, 8, 24))
    with pytest.raises(AssertionError, match='FLOPs'):
        model.flops_per_token()
    optimizer = make_optimizer(model, 'muon')
    before = optimizer.p.clone()
    optimizer.g.normal_()
    optimizer.step(0.1)
    [group] = [group for group in optimizer.groups if 'model.layers.0.mlp.experts.weight' in group.names]
    assert group.rule == 'muon'
    steps = (optimizer.p - before * (1 - 0.1 * group.decay))[group.part].view(3, 8, 24)
    for matrix in steps:        # each is orthogonalized separately
        singular = torch.linalg.svdvals(matrix) / (0.1 * 0.2 * 24 ** 0.5)
        assert 0.6 < singular.min() and singular.max() < 1.3

@parametrize('change', [torch.nn.Module.double, lambda model: model.model.update(dict(embed_tokens=Embedding(70, 32)))])
def test_a_model_that_left_its_optimizer_is_noticed_at_the_next_step(change):
    optimizer = make_optimizer(small_gpt(), 'muon')
    optimizer.step(0.1)
    change(optimizer.model)
    with pytest.raises(AssertionError, match='weight moved; make a new Optimizer'):
        optimizer.step(0.1)

def test_a_second_loss_is_minimized_and_logged_by_its_name(monkeypatch):
    forward = GPT.forward

    def with_decay(self, idx, targets=None):
        loss = forward(self, idx, targets)
        if targets is None or not self.training:
            return loss
        decay = self.lm_head.weight.square().mean()
        self.losses['decay'] = decay.detach()
        return loss + 99 * decay

    plain = train_here('a', '--max_iters=6')
    monkeypatch.setattr(GPT, 'forward', with_decay)
    run = train_here('b', '--max_iters=6')
    decays = [entry['decay'] for entry in run.steps]
    assert plain.losses[0] == run.losses[0] and decays[-1] < decays[0] / 2
    means = train_here('c', '--max_iters=6 --log_interval=3 --micro_batch_size=2').steps
    near([entry['decay'] for entry in means], [decays[0], sum(decays[1:3]) / 2, sum(decays[3:]) / 3], 1e-5)
    near([entry['loss'] for entry in means], [run.losses[0], sum(run.losses[1:3]) / 2, sum(run.losses[3:]) / 3], 1e-4)

def rates_of(steps, **options):
    """Returns the learning rates of steps 0 to `steps`."""
    with train_options(learning_rate=1.0, **options):
        rates = [0.0]
        for step in range(1, steps + 1):
            rates.append(train.get_lr(step, rates[-1]))
    return np.array(rates)

@parametrize('decay, then', [('linear', [1.0, 1.0, 0.1 + 0.9 * 50 / 71.5]), ('cosine', [0.868, 0.858, 0.55])])
def test_the_schedule_warms_up_decays_and_stays(decay, then):
    rates = rates_of(190, min_lr=0.1, warmup_iters=10, max_iters=110, lr_decay=decay)
    near(rates[[0, 5, 10, 35, 36, 60, 110, 190]], [0.0, 0.5, 1.0, *then, 0.1, 0.1], 1e-3)

@parametrize('decay', ['linear', 'cosine'])
@parametrize('warmup_iters', [1, 40, 99, 150])
def test_the_schedule_never_jumps(decay, warmup_iters):
    rates = rates_of(100, warmup_iters=warmup_iters, max_iters=100, lr_decay=decay)[1:]
    assert abs(np.diff(rates)).max() < 0.04
    assert (np.diff(np.sign(np.diff(rates))) <= 0).all()        # it rises, then falls

@parametrize('decay', ['linear', 'cosine'])
def test_the_rate_never_exceeds_learning_rate_when_min_lr_is_above_it(decay):
    assert rates_of(100, min_lr=3.0, warmup_iters=10, max_iters=100, lr_decay=decay).max() == 1.0

# -----------------------------------------------------------------------------
# train.py: complete runs

# All runs use one text. Its tokens are bytes, so no tokenizer has to be trained.
SMALL_RUN = ('--dataset=corpus.txt --tokenizer=byte --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=8 '
             '--warmup_iters=2 --eval_tokens=320 --log_interval=1 --sample_tokens=0 --dtype=float32 --compile=False')

class Run:
    """Reads what a run left in its folder."""
    def __init__(self, folder):
        with open(f'{folder}/log.jsonl') as f:
            self.log = [json.loads(line) for line in f]
        self.steps = [entry for entry in self.log if 'loss' in entry]
        self.losses = [entry['loss'] for entry in self.steps]
        self.val_losses = [entry['val_loss'] for entry in self.log if 'val_loss' in entry]
        self.full_loss = self.log[-1].get('full_val_loss')
        self.checkpoints = checkpoints(folder)
        self.kept = [int(path.name[5:]) for path in self.checkpoints]
        self.last = self.checkpoints[-1]
        # the exact bytes of weights and moments
        self.bits = [path.read_bytes() for path in sorted(self.last.glob('*tensors'))]

def command(line):
    """Runs a script in this process, because a new one takes seconds. Returns its exit status."""
    script, *arguments = line.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sys.argv', [script, *arguments])
        patch.setattr('sys.stdout', sys.stdout)     # train.py wraps both
        patch.setattr('sys.stderr', sys.stderr)
        for name in ('config', *prepare.config):
            patch.setattr(prepare, name, copy.copy(getattr(prepare, name)))     # train.py sets them
        patch.setitem(sys.modules, 'matplotlib.figure', None)       # plotting takes longer than these runs
        try:
            runpy.run_path(str(HERE / script), run_name='__main__')
        except SystemExit as e:
            return e.code
    return 0

def train_here(folder, options=''):
    """Runs train.py with a small model and text."""
    assert command(f'train.py {SMALL_RUN} --out_dir={folder} {options}') == 0
    return Run(folder)

def refusal(line, status=2):
    """Runs a command that must fail. Returns its only line on stderr."""
    with open('stderr.txt', 'w') as file, redirect_stderr(file):
        assert command(line) == status
    lines = Path('stderr.txt').read_text().strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(('error: ', 'diverged: ')), lines
    return lines[0]

def test_a_run_leaves_what_was_promised():
    run = train_here('a', '--max_iters=12 --eval_interval=5')
    assert len(run.losses) == 12
    assert len(run.val_losses) == 3
    assert run.losses[-1] < run.losses[0] - 0.5
    assert run.steps[-1]['tokens'] == 12 * 8 * 16
    assert run.kept == [10, 12]
    # Each card quotes the evaluation of its own weights.
    for step, loss in zip(run.kept, run.val_losses[1:]):
        card = Path(f'a/step_{step:08d}/README.md').read_text()
        for text in 'corpus', f'{step * 8 * 16:,} tokens', f'{step} steps', f'{loss:.4f}', 'license:':
            assert text in card
    again = train_here('b', 'a/config.py --out_dir=b --init_from=scratch')          # its options reproduce it
    assert again.bits == run.bits
    for _ in range(2):
        assert command(f'train.py {SMALL_RUN} --max_iters=1') == 0
    assert sorted(os.listdir('out')) == ['corpus', 'corpus-2']

def test_training_is_what_a_dozen_lines_with_torchs_own_optimizer_do():
    options = '--max_iters=8 --micro_batch_size=2 --optimizer=adamw --adam_eps=1e-3 --grad_clip=0.5 --seed=5 --bias'
    run = train_here('a', options)
    folder = data_folder('corpus-byte')
    data = Shards(folder, 'train', prepare.read_meta(folder))
    torch.manual_seed(5)
    model = GPT(load_model(run.last).config)
    optimizer = torchs('adamw', model.parameters())
    for step, entry in enumerate(run.steps):
        x, y = data.batch(data.starts(8 * step, 8, 16, 5), 16, 'cpu')
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        lr = 6e-3 * min((step + 1) / 2, 0.05 + 0.95 * (7 - step) / (0.65 * 8), 1)
        step_at(optimizer, lr)
        near(entry['loss'], loss, 1e-5)
        near(entry['grad_norm'], norm, 1e-4)
        near(entry['lr'], lr, 1e-7)
    near_weights(load_model(run.last), model, 1e-5)

def test_evaluation_is_the_mean_over_every_token():
    run = train_here('a', '--max_iters=3 --dropout=0.5 --tokenizer=bpe --vocab_size=300')
    ids = torch.from_numpy(np.fromfile(data_folder('corpus-bpe300') / 'val_000.bin', np.uint16)).long()
    model = load_model(run.last).eval()
    each = []
    for x, y in zip(ids[:-1].split(16), ids[1:].split(16)):
        each += F.cross_entropy(model(x[None])[0], y, reduction='none').tolist()
    near(run.full_loss, sum(each) / len(each), 1e-5)
    windows = [sum(each[i:i + 16]) for i in range(0, len(each) - 15, 16)]
    first = sorted(range(len(windows)), key=lambda i: i * (math.sqrt(5) - 1) / 2 % 1)[:20]
    near(run.val_losses[-1], sum(windows[i] for i in first) / 320, 1e-5)
    tok = load_tokenizer(run.last / 'tokenizer.json')
    targets = [ids[16 * i + 1:16 * i + 17] for i in first]
    known = sum(len(tok.decode_bytes(part[part != tok.eot].numpy())) for part in targets)
    near(run.log[-2]['val_bpb'], run.val_losses[-1] * 320 / math.log(2) / known, 1e-5)

def test_a_part_of_text_that_is_sorted_by_kind_has_the_loss_of_the_whole():
    write('a.txt', 'abcdefgh' * 2000)
    kinds = [''.join(random.choices('abcdefgh', [1] * n + [0] * (8 - n), k=3000)) for n in range(1, 9)]
    write('sorted.txt', *kinds)
    train_here('a', '--dataset=a.txt --val_dataset=sorted.txt --max_iters=12 --eval_interval=3')
    folder = data_folder('a-byte')
    meta = prepare.read_meta(folder)
    data = Shards(folder, 'val', meta, load_tokenizer(folder / 'tokenizer.json'))
    for path in checkpoints('a'):
        model = load_model(path).eval()
        whole = train.evaluate(model, data, 16)
        assert whole['val_tokens'] == len(data) - 1
        for tokens in 2048, 4096:
            part = train.evaluate(model, data, 16, tokens)
            assert part['val_tokens'] == tokens
            for name in 'val_loss', 'val_bpb':
                near(part[name] / whole[name], 1.0, 0.02)

def test_dropout_is_fresh_at_every_step_and_micro_batch():
    write('a.txt', 'a' * 4000)        # all sequences are the same; only dropout differs
    options = '--dataset=a.txt --max_iters=6 --learning_rate=0'
    without = train_here('a', options)
    one = train_here('b', f'{options} --dropout=0.5 --batch_size=1')
    two = train_here('c', f'{options} --dropout=0.5 --batch_size=2 --micro_batch_size=1')
    assert len(set(without.losses)) == 1
    assert len({*one.losses, *two.losses}) == 12        # the second micro-batch drops different units

@parametrize('T', [16, 8, 12, 5])
def test_processes_share_the_sequences_of_a_step_whatever_their_length(T, monkeypatch):
    starts, seen = [*range(12)], []
    data = Mock(batch=lambda starts, T, device: seen.append(starts))
    run = Mock(train_data=data, T=16, state=train.State(step=3))
    monkeypatch.setattr('train.WORLD_SIZE', 2)
    for rank in 0, 1:
        monkeypatch.setattr('train.RANK', rank)
        list(train.micro_batches(run, starts, T, 2))
    assert sum(seen, []) == starts and len(seen[0]) == 32 // T

class HighScaler(torch.amp.GradScaler):
    """Overflows at first, so that its scale differs from a new scaler's."""
    def __init__(self, device, enabled):
        super().__init__(device, init_scale=2.0 ** 30, enabled=enabled)

@parametrize('options', [
    '--dropout=0.2 --micro_batch_size=4',
    '--optimizer=adamw --bias=True --beta2=0.9',
    '--dtype=float16',
    '--dtype=bfloat16 --optimizer=momentum --norm=layer'])
def test_a_resumed_run_ends_as_one_that_never_stopped(options, monkeypatch):
    monkeypatch.setattr('torch.amp.GradScaler', HighScaler)
    options += ' --max_iters=30'
    # Neither samples nor other evaluation steps change the result.
    straight = train_here('a', f'{options} --eval_interval=7 --sample_tokens=5')
    options += ' --eval_interval=9'
    train_here('b', options)
    for folder in Run('b').checkpoints[1:]:
        shutil.rmtree(folder)
    with open('b/log.jsonl', 'a') as f:
        f.write('{"step": 25, "lo')     # as if killed while writing
    resumed = train_here('b', f'{options} --init_from=resume')
    assert resumed.bits == straight.bits
    assert resumed.losses == straight.losses

@parametrize('dtype', ['float16', 'bfloat16'])
def test_half_precision_trains_as_float32_does(dtype):
    options = '--max_iters=10 --learning_rate=3e-4'       # gradients are too small for float16's scaler to skip a step
    half = train_here('a', f'{options} --dtype={dtype}')
    full = train_here('b', options)
    near(half.losses, full.losses, 0.02)
    # The log has the unscaled norm.
    near(half.steps[0]['grad_norm'], full.steps[0]['grad_norm'], 0.1)

def test_old_checkpoints_go_and_the_best_stays(printed):
    # Validation text is noise, which training makes ever less likely.
    noise = ''.join(random.choices('bcdefghijklmnop', k=2000))
    write('a.txt', 'a' * 18000 + noise)
    options = '--dataset=a.txt --eval_interval=3 --keep_checkpoints=2 --optimizer=adamw --learning_rate=0.01'
    run = train_here('a', f'{options} --max_iters=12')
    assert min(run.val_losses) == run.val_losses[0]
    assert run.kept == [3, 9, 12]
    said = printed()
    assert re.search('sample from the best checkpoint: .* --out_dir=a/step_00000003\n', said)
    assert train_here('a', f'{options} --max_iters=18 --init_from=resume').kept == [3, 15, 18]

def test_a_finished_run_says_why_nothing_is_left_to_train(printed):
    train_here('a', '--max_iters=4')
    assert 'nothing is left' not in printed()
    train_here('a', '--max_iters=2 --init_from=resume')
    assert 'nothing is left to train after' in printed()

def test_a_finished_run_that_is_trained_further_warms_up_again():
    options = '--warmup_iters=5 --max_iters='
    train_here('a', f'{options}20')
    shutil.copytree('a', 'b')
    run = train_here('a', f'{options}40 --init_from=resume')
    rates = [entry['lr'] for entry in run.steps]
    assert abs(np.diff(rates)).max() < 6e-3 / 5 + 1e-9
    with train_options(warmup_iters=5, max_iters=40):
        near(rates[24:], [train.get_lr(step, 1.0) for step in range(25, 41)], 1e-9)
    assert run.full_loss < Run('b').full_loss
    # If stopped and resumed, it ends the same.
    train_here('b', f'{options}40 --eval_interval=3 --init_from=resume --keep_checkpoints=99')
    for path in Run('b').checkpoints[4:]:
        shutil.rmtree(path)
    assert train_here('b', f'{options}40 --init_from=resume').bits == run.bits

def test_a_folder_of_nanogpt_trains_as_it_is(printed):
    Path('nano').mkdir()
    ids = np.arange(50_257 - 4000, 50_257, dtype=np.uint16)
    ids.tofile('nano/train.bin')
    ids.tofile('nano/val.bin')
    assert run_main(prepare, dataset='nano') == Path('nano')
    near(train_here('a', '--dataset=nano --tokenizer=bpe --n_embd=8 --max_iters=1').losses[0], math.log(50257), 0.3)
    out = printed()
    assert not re.search(r'\d bits per byte', out)
    resume = 'train.py a/config.py --max_iters=2'
    ids[::-1].tofile('nano/train.bin')
    assert 'other data' in refusal(resume)

def test_a_model_of_nanogpts_characters_can_be_sampled():
    write('nano/input.txt', CODE[:5000])
    characters = sorted({*CODE[:5000]})
    for split in 'train', 'val':
        write(f'nano/{split}.bin')
        np.array([*map(characters.index, CODE[:5000])], np.uint16).tofile(f'nano/{split}.bin')
    run = train_here('a', '--dataset=nano --max_iters=1')
    assert load_model(run.last).config.vocab_size == len(characters)
    assert 'put one there' in refusal('sample.py --out_dir=a')
    folder = run_main(prepare, dataset='nano/input.txt', tokenizer='char')
    shutil.copy(folder / 'tokenizer.json', run.last)
    for options in '', '--start=def':
        assert command(f'sample.py --out_dir=a --max_new_tokens=20 {options}') == 0
    shutil.copy(folder / 'tokenizer.json', 'nano')
    run = train_here('b', '--dataset=nano --max_iters=1')
    assert load_model(run.last).config.vocab_size == len(characters) + 1
    assert run.log[-1]['full_val_bpb'] and command('sample.py --out_dir=b --max_new_tokens=5') == 0

def test_a_run_is_resumed_without_its_text_and_a_lost_folder_is_made_again():
    train_here('other', '--max_iters=1 --tokenizer=bpe --vocab_size=300')
    for source in '', '--init_from=other':
        write_corpus('text.txt', 20)
        run = train_here('b', f'--dataset=text.txt --max_iters=4 --eval_interval=1 --keep_checkpoints=9 {source}')
        folder = Path(options_in('b/config.py')['dataset'])
        resume = 'train.py b/config.py'
        for change in partial(write, 'text.txt', 'another text'), partial(os.remove, 'text.txt'):
            change()
            shutil.rmtree(run.checkpoints[-1])
            assert command(resume) == 0
            assert Run('b').bits == run.bits
        shutil.rmtree(folder)
        assert f"no text at '{folder.as_posix()}'; use another path" in refusal(resume)
        [text] = re.findall("^# dataset was made from '(.*?)'$", Path('b/config.py').read_text(), re.M)
        write_corpus(text, 20)
        assert command(f'{resume} --dataset={text} --tokenizer={run.last}/tokenizer.json --max_iters=5') == 0
        assert Run('b').kept[-1] == 5
        shutil.rmtree('b')

def test_another_model_is_evaluated_before_it_is_trained_and_a_new_one_is_not():
    run = train_here('a', '--max_iters=3')
    assert [entry['step'] for entry in run.log if 'val_loss' in entry] == [3]
    further = train_here('b', f'--max_iters=3 --init_from={run.last} --tokenizer=bpe')
    assert [entry['step'] for entry in further.log if 'val_loss' in entry] == [0, 3]
    assert further.val_losses[0] == run.val_losses[0]
    assert further.kept == [3]

def test_runs_that_start_at_once_take_the_next_folder():
    Path('out/corpus').mkdir(parents=True)
    line = f'train.py {SMALL_RUN} --max_iters=2'
    with configurator.lock(Path('out/corpus/.lock')):
        for options in '--out_dir=out/corpus', '--init_from=auto':
            assert 'another process works in out/corpus' in refusal(f'{line} {options}')
        assert command(line) == 0
    assert Run('out/corpus-2').kept == [2]

def test_the_commands_that_a_run_prints_can_be_pasted_in_any_folder():
    os.rename('corpus.txt', 'my text.txt')
    done = launch(HERE / 'train.py', *SMALL_RUN.split(), '--dataset=my text.txt', '--out_dir=my run', '--max_iters=2')
    commands = [shlex.split(line) for line in re.findall('python (.*)', done.stdout)]
    assert len(commands) == 2
    for line in commands:
        launch(*line)

@not_windows
def test_a_notebook_trains_again_from_the_defaults_and_gets_its_signals_back():
    write('cell.py', f'''
import signal, sys
sys.path.insert(0, {str(HERE)!r})
sys.modules['matplotlib.figure'] = None
import train
small = {SMALL_RUN.split()!r} + ['--max_iters=1']
before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
for more in ['--n_layer=1', '--seed=5'], ['--out_dir=b']:
    train.main(small + more)
assert before == [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
''')
    launch('cell.py')
    runs = [read_json(Run(folder).last / 'config.json')['num_hidden_layers'] for folder in ('out/corpus', 'b')]
    assert runs == [1, 2] and 'seed' not in options_in('b/config.py')

def test_a_thread_can_train():
    thread = threading.Thread(target=run_main, args=(train, *SMALL_RUN.split(), '--max_iters=2'))
    thread.start()
    thread.join()
    assert Run('out/corpus').kept == [2]

@parametrize('stdout', ['io.StringIO()', 'None'])
def test_a_run_needs_no_terminal(stdout):
    """Replaces sys.stdout, as Jupyter and IDLE do."""
    arguments = ['train.py', *SMALL_RUN.split(), '--max_iters=2']
    write('cell.py', f'import io, runpy, sys\nsys.argv = {arguments}\nsys.stdout = {stdout}\n'
          f'sys.path.insert(0, {str(HERE)!r})\nrunpy.run_path({str(HERE / "train.py")!r}, run_name="__main__")\n')
    done = launch('cell.py')
    assert Run('out/corpus').kept == [2]
    assert done.stderr == ''

def test_a_second_run_in_a_notebook_begins_with_the_defaults():
    write('twice.py', f'import runpy, sys\nsys.path.insert(0, {str(HERE)!r})\n'
          f'for options in ["--pattern=gpt4"], []:\n    sys.argv = ["train.py", "--dataset=corpus.txt", *options]\n'
          f'    sys.argv += {[*SMALL_RUN.split()[2:], "--max_iters=1"]}\n'
          f'    runpy.run_path({str(HERE / "train.py")!r}, run_name="__main__")\n'
          f'    import shutil; shutil.move("data", f"data{{len(options)}}")\n')
    launch('twice.py')
    folders = [path for n in (1, 0) for path in Path(f'data{n}').glob('corpus-bpe4096-*')]
    patterns = [read_json(folder / 'meta.json')['pattern'] for folder in folders]
    assert patterns == ['gpt4', 'gpt2']

def test_main_can_be_called_from_a_script_that_imports_train():
    run_main(train, *SMALL_RUN.split(), '--max_iters=2')
    assert Run('out/corpus').kept == [2]

def test_a_finished_run_is_left_as_it_is(printed):
    run = train_here('a', '--max_iters=3 --dropout=0.5')
    printed()
    train_here('a', '--init_from=resume --dropout=0.5 --eval_only')
    tokens = run.log[-1]['full_val_tokens']
    assert re.search(f'loss {run.full_loss:.4f} .* over all {tokens:,} validation tokens of corpus', printed())
    again = train_here('a', '--init_from=resume --max_iters=3 --dropout=0.5')
    assert again.log == run.log
    assert again.bits == run.bits

def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(capsys):
    options = '--max_iters=9 --eval_interval=3'
    run = train_here('a', options)
    path = run.last / 'training.tensors'
    path.write_bytes(path.read_bytes()[:-1])
    again = train_here('a', f'{options} --init_from=resume')
    assert f'{path} is damaged' in capsys.readouterr().err
    assert again.bits == run.bits

@not_windows
def test_a_checkpoint_that_is_a_link_and_a_leftover_keep_nothing_from_being_saved():
    run = train_here('a', '--max_iters=2')
    run.last.rename('elsewhere')
    run.last.symlink_to(Path('elsewhere').absolute())
    Path('a/.step_00000004.partial').mkdir()
    assert train_here('a', '--max_iters=6 --eval_interval=2 --keep_checkpoints=1 --init_from=resume').kept == [6]
    assert train_here('a', '--max_iters=8 --init_from=resume').kept == [6, 8]

def test_damage_to_a_log_keeps_nothing_from_being_saved():
    train_here('a', '--max_iters=4')
    text = Path('a/log.jsonl').read_text()
    merged, cut = text.replace('}\n{', '{', 1), text[:-20]
    for steps, damaged in enumerate((merged, cut, text + '\0' * 50), 5):
        write('a/log.jsonl', damaged)
        assert train_here('a', f'--max_iters={steps} --init_from=resume').kept[-1] == steps

def test_printed_lines_and_a_changed_number_of_processes_follow_a_resume():
    options = '--log_interval=4 --eval_interval=6'
    straight = train_here('a', f'{options} --max_iters=18')
    train_here('b', f'{options} --max_iters=18 --keep_checkpoints=9')
    for path in Run('b').checkpoints[1:]:
        shutil.rmtree(path)
    for process in start_ranks(f'train.py {SMALL_RUN} {options} --max_iters=18 --out_dir=b --init_from=resume', 2):
        assert status_of(process) == 0
    lines = [[(entry['step'], entry['tokens']) for entry in run.log] for run in (straight, Run('b'))]
    assert lines[0] == lines[1]
    near(Run('b').losses, straight.losses, 1e-5)

def test_a_run_goes_on_with_another_batch_and_context():
    train_here('a', '--max_iters=4 --dropout=0.1')
    run = train_here('a', '--max_iters=5 --dropout=0.1 --batch_size=4 --block_size=8 --init_from=resume')
    assert options_in('a/config.py')['batch_size'] == 4
    assert run.steps[-1]['tokens'] == 4 * 8 * 16 + 4 * 8

def options_in(path):
    return configurator.run_file(str(path), Options(train.config))

def test_a_config_file_of_a_run_makes_a_model_of_another_size():
    train_here('a', '--max_iters=1')
    assert command('train.py a/config.py --n_embd=96 --out_dir=b --init_from=scratch') == 0
    assert read_json(Run('b').last / 'config.json')['intermediate_size'] == 256

def test_a_model_of_a_single_document_begins_with_a_line_break_and_knows_no_end(printed):
    write('one.txt', CODE[:20_000])
    write('two.txt', CODE[:9000], CODE[9000:20_000])
    one = train_here('a', '--max_iters=2 --dataset=one.txt --tokenizer=char --sample_tokens=9')
    two = train_here('b', '--max_iters=2 --dataset=two.txt')
    assert [read_json(run.last / 'config.json')['eos_token_id'] for run in (one, two)] == [None, 256]
    tok = load_tokenizer(one.last)
    assert sample.prompt_ids(tok, '', find_ends(one.last)) == tok.encode('\n')
    assert sample.prompt_ids(byte_tokenizer(), '', []) == [10]
    assert sample.prompt_ids(CharTokenizer('ACGT'), '', []) == [0]
    further = train_here('c', f'--max_iters=1 --dataset=one.txt --init_from={two.last} --tokenizer=bpe')
    assert read_json(further.last / 'config.json')['eos_token_id'] == 256       # which the first model has learned
    for split in 'train', 'val':
        assert tok.eot not in np.fromfile(data_folder('one-char') / f'{split}_000.bin', np.uint16)

def test_a_folder_that_somebody_else_made_changes_no_file_outside(printed):
    run = train_here('a', '--max_iters=2')
    for name in 'bashrc', 'evil.py':
        write(name, 'mine')
    Path('a/.log.jsonl.partial').symlink_to(Path('bashrc').absolute())
    write(run.last / 'tokenizer_evil.py', '')
    (run.last / 'tokenizer_link.json').symlink_to(Path('evil.py').absolute())
    train_here('a', '--max_iters=3 --init_from=resume')
    last = train_here('b', f'--max_iters=1 --init_from={run.last} --tokenizer=bpe').last
    assert Path('bashrc').read_text() == 'mine'
    assert not [path for path in last.iterdir() if 'evil' in path.name or 'link' in path.name]

def test_training_takes_the_options_of_the_data():
    docs = [json.dumps(dict(body=f'{i} and more')) for i in range(100)]
    write('docs.jsonl', '\n'.join(docs))
    assert command(f'train.py {SMALL_RUN} --dataset=docs.jsonl --text_field=body --val_fraction=0.5 --max_iters=1') == 0
    assert 30 < read_json(data_folder('docs-byte') / 'meta.json')['val']['documents'] < 70
    assert options_in('out/docs/config.py')['text_field'] == 'body'

def test_moments_of_other_weights_are_refused():
    run = train_here('a', '--max_iters=1')
    model = small_gpt()
    model.model.norm.weight.requires_grad_(False)
    with user_error('other tensors .m.model.norm.weight'):
        train.restore(run.last, make_optimizer(model, 'muon'), dict(options=dict(optimizer='muon')))

def test_a_run_that_was_renamed_goes_on_by_its_own_config_file():
    train_here('a', '--max_iters=4')
    os.rename('a', 'b')
    assert command('train.py b/config.py --max_iters=5') == 0
    assert not Path('a').exists()
    assert Run('b').kept == [4, 5]

# changed option | text in the error
CHANGES = '''
--n_embd=64 | n_embd = 32
--mlp=gelu | mlp = swiglu
--block_size=32 | block_size = 16
--optimizer=adamw | --optimizer
--tokenizer=char | other data
--out_dir=b | b has no checkpoint
--init_from=scratch | already has a run
'''

def test_what_may_not_change_in_a_run_is_refused_by_name():
    train_here('a', '--max_iters=2')
    for option, says in rows(CHANGES):
        assert says in refusal(f'train.py {SMALL_RUN} --max_iters=4 --out_dir=a --init_from=resume {option}')
    other = refusal(f'train.py {SMALL_RUN} --tokenizer=bpe --out_dir=b --init_from=a --mlp=gelu')
    assert 'use --mlp=swiglu' in other

def test_a_checkpoint_or_a_hugging_face_folder_starts_a_run_with_its_own_tokenizer():
    first = train_here('a', '--max_iters=3 --tokenizer=bpe --vocab_size=300')
    ours = shutil.ignore_patterns('manifest.json', 'training*')
    shutil.copytree(first.last, 'theirs', ignore=ours)
    write_corpus('new.txt', 22)
    for source in 'a', 'theirs', 'auto:theirs':
        options = f'--dataset=new.txt --init_from={source} --block_size=8 --learning_rate=0 --max_iters=1'
        run = train_here('b', options)
        for name in 'model.safetensors', 'tokenizer.json', 'config.json':
            assert (run.last / name).read_bytes() == (first.last / name).read_bytes()
        assert command('train.py b/config.py --init_from=resume --max_iters=2') == 0
        assert Run('b').kept == [1, 2]
        assert options_in('b/config.py')['init_from'] == 'resume'
        if source == 'auto:theirs':     # the same command continues the run
            assert train_here('b', options.replace('iters=1', 'iters=3')).kept == [1, 2, 3]
        shutil.rmtree('b')
    folder = run_main(prepare, dataset='new.txt', tokenizer='byte')
    options = '--init_from=theirs --max_iters=1'
    assert 'not made with' in refusal(f'train.py {SMALL_RUN} --dataset={folder} {options}')
    assert 'use --block_size=16' in refusal(f'train.py {SMALL_RUN} --dataset=new.txt --block_size=32 {options}')

def test_a_token_that_the_model_lacks_does_no_harm_if_no_text_has_it():
    first = train_here('a', '--max_iters=1')
    shutil.copytree(first.last, 'theirs', ignore=shutil.ignore_patterns('manifest.json', 'training*'))
    tok = read_json('theirs/tokenizer.json')
    tok['added_tokens'].append(dict(tok['added_tokens'][-1], id=257, content='[PAD]'))
    write('theirs/tokenizer.json', json.dumps(tok))
    last = train_here('b', '--init_from=theirs --tokenizer=bpe --max_iters=1').last
    assert read_json(last / 'config.json')['vocab_size'] == 257
    assert load_tokenizer(last / 'tokenizer.json').vocab_size == 258

@parametrize('damage', ['{"model_type": "qwen3"}', '{"model_type": ["qwen3"]}', '[1]', '[' * 10_000,
                        '{"model_type": "gpt_ablation", "gpt_config": {"n_layer": "2"}}', '{"n_layer": 1}',
                        '{"model_type": "gpt_ablation", "gpt_config": {"height": 2}}'])
def test_a_model_that_is_badly_described_is_one_line(damage):
    save(small_gpt(), 'theirs')
    os.remove('theirs/manifest.json')
    write('theirs/config.json', damage)
    for line in 'sample.py --out_dir=theirs', f'train.py {SMALL_RUN} --init_from=theirs':
        assert 'Traceback' not in refusal(line)

def test_a_llama_with_a_tokenizer_of_another_kind_is_trained_further_and_opens_there(printed):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    write_corpus('new.txt', 22)
    put_on_hub('theirs')
    base = Path('hub/theirs')
    write(base / 'chat_template.jinja', '{{ messages }}')
    ids = dict(bos_token_id=1, eos_token_id=7, pad_token_id=0)        # 7 ends a turn, as in chat models
    write(base / 'config.json', json.dumps(read_json(base / 'config.json') | ids))
    write(base / 'generation_config.json', json.dumps(dict(eos_token_id=[7, 9], top_k=5)))
    options = ('--dataset=new.txt --init_from=hub/theirs --tokenizer=bpe --n_head=4 --block_size=8 --max_iters=2 '
               '--sample_tokens=3')
    last = train_here('b', options).last
    assert (last / 'chat_template.jinja').read_bytes() == (base / 'chat_template.jinja').read_bytes()
    assert read_json(last / 'config.json')['eos_token_id'] == 2         # which ends each document
    assert read_json(last / 'generation_config.json') == dict(eos_token_id=[7, 9], top_k=5)
    assert AutoModelForCausalLM.from_pretrained(last).generation_config.eos_token_id == [7, 9]
    shard, = Path('data').glob('new-*/train_000.bin')
    shard = np.fromfile(shard, np.uint16)
    assert shard[0] == 1 and {*shard[1:][shard[:-1] == 2]} == {1}       # each document begins with <s>
    theirs = AutoTokenizer.from_pretrained(last)
    tok = load_tokenizer(last / 'tokenizer.json')
    ids = [1, *tok.encode('def')]       # tokenizer.json asks for <s>
    assert (theirs.eos_token, theirs('def').input_ids) == ('</s>', ids)
    printed()
    run_main(sample, out_dir='b', start='def', num_samples=1, max_new_tokens=9, temperature=0.0, dtype='float32')
    steps = generate(load_model(last).eval(), [ids], 9, [2, 7, 9], tok.vocab_size, temperature=0.0)
    assert printed() == f'def{sample.texts_of(steps, tok, [2, 7, 9])[0]}\n'

def test_a_diverging_run_stops_with_status_3_and_saves_nothing_bad():
    good = train_here('a', '--max_iters=5')
    for options in '--log_interval=1', '--log_interval=100 --eval_interval=5':
        options += ' --max_iters=60 --init_from=resume --learning_rate=1e30 --grad_clip=0'
        line = refusal(f'train.py {SMALL_RUN} --out_dir=a {options}', status=3)
        # It stops soon, at a log line or an evaluation.
        assert re.match(r'diverged: .* at step ([6-9]|10)\b', line)
        assert Run('a').bits == good.bits
    options = '--optimizer=sgd --learning_rate=1e30 --log_interval=50 --eval_interval=5 --sample_tokens=5'
    assert 'at step 5' in refusal(f'train.py {SMALL_RUN} --out_dir=b {options}', status=3)      # no sample of nan

def test_a_sample_text_that_fails_ends_no_run(printed):
    options = '--dataset=one.txt --tokenizer=char --sample_tokens=5 --sample_start=é --max_iters=2'
    write('one.txt', 'all of the letters in here are ASCII. ' * 99)
    assert train_here('a', options).kept == [2]
    assert 'the sample text failed (UserError: the vocabulary of characters lacks' in printed()

def test_a_run_that_saved_nothing_can_not_be_resumed_as_another_one():
    options = f'{SMALL_RUN} --out_dir=a'
    assert status_of(start_alone(f'train.py {options} --learning_rate=1e30 --grad_clip=0')) == 3
    assert 'no checkpoint' in refusal(f'train.py {options} --init_from=resume')
    for line in 'sample.py --out_dir=a', f'train.py {SMALL_RUN} --init_from=a', 'bench.py --what=diagnose --out_dir=a':
        assert 'a has no checkpoint yet; wait for the first one' in refusal(line)
    assert command(f'train.py {options} --max_iters=1') == 0          # nothing is lost if it begins again

class SomeIds:
    """Replaces Shards: 801 ids."""
    starts = Shards.starts

    def __len__(self):
        return 801

    def batch(self, starts, T, device):
        return random_ids(2, len(starts), T)

def test_a_micro_batch_that_does_not_fit_is_made_smaller(monkeypatch):
    tried = []

    def cramped(x, y):
        tried.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError
        monkeypatch.setattr('torch.cuda.mem_get_info', lambda device: (0.5 / len(x), 10.0))      # too little at 4
        return torch.zeros(1, requires_grad=True)

    monkeypatch.setattr('train.micro_batch_sizes', lambda T, device: [8, 4, 2])
    monkeypatch.setattr('torch.empty', lambda size, device: None)
    run = Mock(opt=train.Optimizer(small_gpt()), train_data=SomeIds(), T=16, device='cuda:0')
    assert train.choose_micro_batch(run, cramped) == 2 and tried == [8, 4, 2]
    monkeypatch.setattr('train.micro_batch_sizes', lambda T, device: [8, 4])
    with user_error('a micro-batch of 4 does not fit; use a smaller --micro_batch_size'):
        train.choose_micro_batch(run, cramped)
    run.device = 'cpu'          # is not asked
    assert train.choose_micro_batch(run, cramped) == 8

@parametrize('device, memory, tokens', [('cpu', 0, 4096), ('mps', 0, 4096), ('cuda:0', 16e9, 16e3),
                                        ('cuda:0', 85e9, 65536)])
def test_a_micro_batch_is_as_large_as_pays_on_the_device(device, memory, tokens, monkeypatch):
    monkeypatch.setattr('torch.cuda.get_device_properties', lambda device: Mock(total_memory=memory))
    with train_options(batch_size=4096):
        sizes = train.micro_batch_sizes(64, device)
    assert sizes[0] * 64 <= tokens < sizes[0] * 128
    assert all(4096 % size == 0 for size in sizes) and sizes[-1] == 1

@parametrize('left', [dict(RANK='1'), dict(WORLD_SIZE='2'), dict(RANK='0', WORLD_SIZE='4')])
def test_half_an_environment_of_torchrun_is_refused(left, monkeypatch):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert 'use torchrun, or unset both' in refusal(f'train.py {SMALL_RUN}')

def test_a_batch_that_does_not_divide_among_processes_is_refused(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '3')
    assert 'use --batch_size=9' in refusal(f'train.py {SMALL_RUN}')

# -----------------------------------------------------------------------------
# train.py: timing and wandb

def fake_clock(monkeypatch, first, others):
    """Fakes a clock that each batch advances: by `first`, then `others` seconds in training, by 1000 in evaluations."""
    now, batch = [0.0], Shards.batch
    seconds = itertools.chain([first], itertools.repeat(others))

    def slow_batch(self, *args):
        now[0] += next(seconds) if torch.is_grad_enabled() else 1000
        return batch(self, *args)

    monkeypatch.setattr('prepare.Shards.batch', slow_batch)
    monkeypatch.setattr('time.perf_counter', lambda: now[0])

def lines_of_steps(out):
    """Returns {step: its last printed line}."""
    return dict(re.findall(r'^step (\d+) \| (loss .*)', out, re.M))

def test_printed_lines_have_the_mean_loss_the_speed_and_the_time_left(monkeypatch, printed):
    each = train_here('a', '--max_iters=12').losses
    fake_clock(monkeypatch, 60.0, 2.0)
    train_here('b', '--max_iters=12 --log_interval=4 --eval_interval=6')
    lines = lines_of_steps(printed())
    assert '2000.0 ms | 64 tok/s | 0:00:08 left' in lines['8']
    # Each mean covers the steps since the previous line or evaluation.
    spans = {'1': each[:1], '4': each[1:4], '8': each[6:8]}
    for last, losses in spans.items():
        mean = float(lines[last].split()[1])
        near(mean, sum(losses) / len(losses), 1e-4)

def test_a_time_budget_ends_the_schedule_in_time(monkeypatch, printed):
    train_here('a', '--max_iters=1')
    fake_clock(monkeypatch, 60.0, 1.0)      # the first step, which may compile, does not count
    options = '--max_iters=100000 --max_minutes=1 --warmup_iters=10'
    run = train_here('b', f'{options} --eval_interval=100000')
    rates = [entry['lr'] / 6e-3 for entry in run.steps]
    assert 55 < len(rates) < 65
    near(rates[:10], torch.arange(1, 11) / 10, 1e-6)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    near(rates[40], 0.05 + 0.95 * 0.35 / 0.65, 0.05)
    assert rates[-1] < 0.08
    assert '0:00:49 left' in lines_of_steps(printed())['12']
    assert run.steps[0]['seconds'] == 0
    # Each batch of the final evaluation takes 1000 s, so the limit of a minute stops it after the first.
    assert run.log[-1]['full_val_tokens'] == 2048
    assert train_here('b', f'{options} --init_from=resume').log == run.log
    assert 'nothing is left to train after' in printed()

class FakeWandb:
    """Replaces wandb: keeps entries and ids, and may fail at the second entry."""
    def __init__(self, fails):
        self.fails, self.entries, self.ids, self.id = fails, [], [], 'new'

    def init(self, id, **options):
        self.ids.append(id)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ('*', 'step')

    def log(self, entry):
        assert not self.fails or entry['step'] < 2
        self.entries.append(entry)

@parametrize('fails', ['', 'import', 'log'])
def test_wandb_gets_the_log_and_may_be_absent_or_fail(fails, monkeypatch, printed):
    straight = train_here('a', '--max_iters=4')
    wandb = None if fails == 'import' else FakeWandb(fails)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    run = train_here('b', '--max_iters=4 --wandb_log')
    assert run.losses == straight.losses
    if fails:
        assert 'wandb failed' in printed()
    else:
        assert wandb.entries == run.log
        train_here('b', '--max_iters=5 --wandb_log --init_from=resume')
        assert wandb.ids == [None, 'new']
# -----------------------------------------------------------------------------
# sample.py

def draws(model, prompts, n, **options):
    """Returns the ids that follow each prompt."""
    steps = generate(model, prompts, n, **options)
    return [[*ids] for ids in zip(*steps)]

# These four tokens have probabilities in the ratio 3 : 10 : 1 : 6.
LOGITS = torch.tensor([[3.0, 10.0, 1.0, 6.0]]).log()

# options | resulting ratio of the four
FILTERS = '''
--temperature=1 | 3 10 1 6
--temperature=0.5 | 9 100 1 36
--temperature=0 | 0 1 0 0
--top_k=2 | 0 10 0 6
--top_p=0.49 | 0 1 0 0
--top_p=0.51 | 0 10 0 6
--top_p=0.6 --top_k=3 | 0 10 0 6
'''

@parametrize('arguments, weights', rows(FILTERS))
def test_temperature_is_a_power_of_the_probabilities_and_filtering_keeps_the_likeliest(arguments, weights):
    options = Options(dict(temperature=1.0, top_k=0, top_p=1.0))
    options.read(arguments.split())
    probs, ids = sample.next_token_probs(LOGITS, **options)
    if ids is not None:
        probs = torch.zeros(1, 4).scatter(1, ids, probs)
    want = torch.tensor([numbers(weights)])
    close(probs, want / want.sum())

def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    u = torch.linspace(0, 1 - 2 ** -24, 10_001)         # up to the largest value of torch.rand
    ids = sample.draw(probs.expand(10_001, 6), None, u)
    counts = torch.bincount(ids, minlength=6)
    close(counts / 10_001, probs, rtol=0, atol=2e-4)
    assert not counts[probs == 0].any()

def plain_generate(model, prompt, n):
    """Generates the likeliest token n times, rereading the text each time."""
    block_size = model.config.block_size
    text = prompt[-block_size:]         # only the end of a long prompt counts
    new = []
    for _ in range(n):
        logits = model(torch.tensor([text]))
        likeliest = logits[0, -1].argmax().item()
        new.append(likeliest)
        text = text + [likeliest]
        if len(text) > block_size:
            text = text[-(block_size // 2):]        # a full context continues from its last half
    return new

@parametrize('name, block_size', [('qwen3', 16), ('gpt2', 16), ('naive', 2)])
def test_generation_is_the_plain_loop_past_the_context(name, block_size):
    model = small_gpt(name, block_size=block_size)
    for length in 1, 16, 20:
        prompt = random_ids(length).tolist()
        want = plain_generate(model, prompt, 40)
        assert draws(model, [prompt], 40, temperature=0) == [want]

def test_each_token_but_the_first_takes_one_step_of_decoding(monkeypatch):
    model = small_gpt()
    decode = Mock(side_effect=model.decode)
    monkeypatch.setattr(model, 'decode', decode)
    for n in 1, 2, 9:
        decode.reset_mock()
        draws(model, [[1], [2, 3]], n)
        assert decode.call_count == n - 1

def test_a_bigram_model_generates():
    model = small_gpt(block_size=1)
    ids = [3, *draws(model, [[3]], 5, temperature=0)[0]]
    assert ids[1:] == model(torch.tensor(ids[:-1])[:, None])[:, 0].argmax(-1).tolist()

@parametrize('options', [{}, dict(top_k=20, top_p=0.8), dict(temperature=0), dict(temperature=2.0, top_p=0.5)])
@parametrize('name', ['qwen3 gqa', 'llama mqa', 'gpt2', 'no norm', 'naive', 'value embeddings'])
def test_a_text_of_a_batch_depends_on_its_prompt_and_its_seed_alone(name, options):
    model = small_gpt(name)
    prompts = [[1], [2] * 5, [3] * 16, [4] * 30, [5] * 17, [1]]
    together = draws(model, prompts, 40, seed=7, **options)
    for i, prompt in enumerate(prompts):
        alone = draws(model, [prompt], 40, seed=7 + i, **options)
        assert together[i] == alone[0]
    assert options.get('temperature') == 0 or together[0] != together[5]

def test_a_text_ends_at_its_stop_token_and_the_batch_with_its_last_text():
    model = small_gpt()
    free = draws(model, [[0]], 60)[0]
    ends = [free[9], free[3]]
    end = min(map(free.index, ends)) + 1
    ended = free[:end]
    assert draws(model, [[0]], 60, ends=ends) == [ended]
    first, second = draws(model, [[0], [1]], 60, ends=ends)
    assert first[:end] == ended
    assert set(first[end:]) == {ends[0]}

def test_a_sampling_option_sees_all_of_each_text_and_may_change_logits_in_place(monkeypatch):
    """Here is one that forbids repetitions, past the context."""
    def never_again(logits, texts):
        seen.append([[*text] for text in texts])
        for row, text in zip(logits, texts):
            row[text] = -math.inf
        return plain(logits)
    seen, plain = [], sample.next_token_probs
    monkeypatch.setattr(sample, 'next_token_probs', never_again)
    model = small_gpt()
    sample.prepare_model(model, 'cpu', 'float32', False, rows=2)
    prompts = [random_ids(1).tolist(), [*range(model.config.block_size + 3)]]
    found = [prompt + new for prompt, new in zip(prompts, draws(model, prompts, 30))]
    assert all(len(text) == len(set(text)) for text in found)
    assert seen == [[text[:i - 30] for text in found] for i in range(30)]

@parametrize('options', [dict(temperature=1e-38), dict(temperature=1e-6, top_k=3), dict(top_p=1e-300),
                         dict(top_p=0.0, top_k=3), dict(temperature=0, top_p=0.5)])
def test_options_near_zero_take_the_likeliest_token(options):
    model = small_gpt()
    model.lm_head.weight.data *= 100        # divided by a tiny temperature, logits overflow
    assert draws(model, [[1], [2]], 20, **options) == draws(model, [[1], [2]], 20, temperature=0)

def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    [ids] = draws(small_gpt(), [[0]], 100, vocab_size=10)
    assert max(ids) < 10

@needs_compiler
@parametrize('B', [1, 2])
@torch.no_grad()
def test_compiled_generation_is_the_plain_one(B):
    model = small_gpt(n_layer=1, bias=True)
    prompts = random_ids(B, 3).tolist()
    plain = list(generate(model, prompts, 4, temperature=0))
    with torch._inductor.config.patch(freezing=False):          # restored after the test
        sample.prepare_model(model, 'cpu', 'float32', True, B)
        assert list(generate(model, prompts, 4, temperature=0)) == plain

# -----------------------------------------------------------------------------
# running sample.py

class Card(TorchDispatchMode):
    """Records functions that make a tensor outside the device 'meta', our fake GPU, which stores only shapes."""
    def __init__(self):
        super().__init__()
        self.elsewhere = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if any(isinstance(x, torch.Tensor) and not x.is_meta for x in tree_leaves(out)):
            self.elsewhere.add(str(function))
        return out

@every_setting
def test_all_that_a_model_on_a_gpu_computes_with_lies_there(name, monkeypatch):
    monkeypatch.setattr('torch.Tensor.tolist', lambda self: [1] * len(self))        # meta tensors have no values
    monkeypatch.setattr('torch.Tensor.__int__', lambda self: 4)
    model = small_gpt(name, dropout=0.1).to('meta')
    optimizer = make_optimizer(model, 'muon')
    idx = torch.zeros(2, 8, dtype=torch.int64, device='meta')
    with Card() as card:
        model(idx, idx).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.clip(1.0)
        optimizer.step(0.1)
        optimizer.step(0.1)
        assert not card.elsewhere
        model.eval()
        list(generate(model, [[1, 2, 3], [4, 3, 2, 1]], 3 * model.config.block_size, top_p=0.9))
    # Each text has its own generator, on the CPU.
    assert card.elsewhere <= {'aten.rand.generator', 'aten.stack.default'}

def write_run(name, age=0):
    """Saves a run of a random model, `age` seconds old."""
    folder = save(small_gpt(vocab_size=257), f'out/{name}/step_00000001', eot=256)
    made = time.time() - age
    os.utime(folder, (made, made))
    return folder

def texts_in(output):
    return output.removesuffix('\n').split('\n' + '-' * 40 + '\n')

def test_a_text_that_appears_byte_by_byte_is_the_one_that_is_decoded_at_once(printed):
    write_run('a')
    run_main(sample, start='é', num_samples=5, max_new_tokens=60, seed=1)
    together = texts_in(printed())
    for i, text in enumerate(together):
        run_main(sample, start='é', num_samples=1, max_new_tokens=60, seed=1 + i)
        assert texts_in(printed()) == [text]
    assert '\ufffd' in ''.join(together)
    assert len({*together}) == 5

def test_the_newest_run_is_taken_and_its_newest_intact_checkpoint():
    write_run('new', age=10)
    write_run('older', age=30)
    shutil.copytree('out/new/step_00000001', 'out/new/step_00000002')
    write('out/new/step_00000002/config.json', '{}')
    done = launch(HERE / 'sample.py', '--temperature=0', '--max_new_tokens=9', '--start=ab', '--device=cpu')
    assert 'step_00000002/config.json is damaged' in done.stderr
    assert 'out/new/step_00000001 |' in done.stderr
    assert '\n36 tokens in' in done.stderr
    texts = texts_in(done.stdout)
    assert texts == 4 * texts[:1]

def test_a_prompt_may_be_a_file(printed, monkeypatch):
    write_run('a')
    monkeypatch.setenv('HOME', os.getcwd())
    monkeypatch.setenv('USERPROFILE', os.getcwd())
    Path('prompt.txt').write_bytes('\ufeffdéjà\nvu'.encode())        # with a byte order mark, as on Windows
    for path in 'prompt.txt', '~/prompt.txt':
        run_main(sample, start=f'FILE:{path}')
        assert printed().startswith('déjà\nvu')

def test_a_prompt_loses_the_line_break_of_an_editor_and_a_space_at_its_end_is_named(capsys, small_bpe):
    folder = save(small_gpt(vocab_size=small_bpe.vocab_size), 'out/a/step_00000001')
    os.remove(folder / 'manifest.json')
    small_bpe.save(folder / 'tokenizer.json')
    write('prompt.txt', 'def \n\n')
    for start, ending, hint in ('def', 'def', False), ('def ', 'def ', True), ('FILE:prompt.txt', 'def \n', False):
        run_main(sample, out_dir=str(folder), start=start, num_samples=1, max_new_tokens=1)
        out, err = capsys.readouterr()
        assert out.startswith(ending) and not out.startswith(ending + '\n')
        assert ('the prompt ends with a space' in err) == hint

# unusable prompt, text in the error
PROMPTS = [('FILE:nothing.txt', 'nothing.txt'), ('FILE:latin.txt', 'UTF-8')]

@parametrize('start, says', PROMPTS)
def test_a_prompt_that_cannot_be_used_is_one_error(start, says):
    folder = save(small_gpt(vocab_size=120), 'out/a/step_00000001')
    Path('latin.txt').write_bytes(b'd\xe9j\xe0')
    with user_error(says):
        run_main(sample, out_dir=str(folder), start=start)

def test_a_model_or_a_tokenizer_in_another_format_is_one_error():
    theirs = save_theirs('Llama')
    torch.save(theirs.state_dict(), 'theirs/pytorch_model.bin')
    os.remove('theirs/model.safetensors')
    with user_error('theirs has no model.safetensors; make one'):
        find_folder('theirs')
    write('theirs/tokenizer.model', '')
    for path in 'theirs', 'theirs/tokenizer.model':
        with user_error('is missing or is not a .json; put one there'):
            load_tokenizer(path)
    with user_error('theirs/tokenizer.json. is unknown; use .* the path of a tokenizer.json'):
        run_main(prepare, dataset='corpus.txt', tokenizer='theirs/tokenizer.json')

def test_a_model_without_its_tokenizer_is_one_error():
    folder = write_run('a')
    os.remove(folder / 'tokenizer.json')
    os.remove(folder / 'manifest.json')
    with user_error('tokenizer.json'):
        run_main(sample, out_dir=str(folder))
# -----------------------------------------------------------------------------
# bench.py

def run_bench(line, **options):
    """Returns what bench.py prints with these arguments and options, for a small model and text."""
    arguments = f'{SMALL_RUN} --n_head=4 --steps=2 --warmup_steps=1 {line}'.split()
    with redirect_stdout(io.StringIO()) as out:
        run_main(bench, *arguments, **options)
    return out.getvalue()

def table(out):
    """Returns the rows of printed tables: {first cell: the others}"""
    rows = {}
    for line in re.findall(r'^\|(.*)\|$', out, re.M):
        first, *others = map(str.strip, line.split('|'))
        rows[first] = others
    return rows

def numbers_after(word, out):
    return numbers(re.search(rf'^{word}.*', out, re.M)[0])

# -- speed

def test_each_call_is_timed_alone():
    seconds = bench.laps(lambda: time.sleep(0.02), 'cpu', 3)
    assert len(seconds) == 3
    assert all(0.02 <= x < 0.5 for x in seconds)

def test_a_training_step_is_timed(monkeypatch):
    monkeypatch.setattr('bench.matmul_flops', lambda *args: 2e12)
    out = run_bench('--batch_size=8 --micro_batch_size=2')
    ms, _, rate = numbers_after('step', out)
    assert rate == pytest.approx(8 * 16 / ms * 1e3, rel=0.05)
    flops = rate * small_gpt(vocab_size=257).flops_per_token()
    assert numbers_after('compute', out) == pytest.approx([flops / 1e12, 100 * flops / 2e12, 2], rel=0.02, abs=0.06)

def test_the_time_of_a_run_is_that_of_its_steps(monkeypatch):
    monkeypatch.setattr('bench.laps', lambda function, device, n: [0.5] * n)
    assert bench.matmul_flops('cpu', 'float32') == 4 * 4096 ** 3
    out = run_bench('--max_iters=72000')
    assert numbers_after('run', out)[0] == pytest.approx(72_000 * 8 * 16, rel=0.05)
    assert 'about 10:00:00\n' in out

def test_the_ladder_and_sampling_say_how_fast():
    assert run_bench('--what=ladder').count('tokens/s') == 4
    out = run_bench('--what=sample --samples=3 --new_tokens=10 --rounds=1')
    _, _, rate, ms = numbers_after('sample', out)
    assert rate == pytest.approx(3e3 / ms, rel=0.02)
    assert '3 x 5 tokens' in out
    assert 'MB of weights' in out

# -- check

def test_the_check_passes_here_and_fails_where_something_is_wrong(monkeypatch):
    assert run_bench('--what=check').endswith('pass\n')
    attend, step = fused_attention, train.Optimizer.step

    def wrong_attention(*args, **options):
        return 1.001 * attend(*args, **options)

    def wrong_step(optimizer, lr):
        step(optimizer, lr)
        patch.setattr('train.Optimizer.step', no_number)        # the device runs after the CPU

    def no_number(optimizer, lr):
        optimizer.p.fill_(math.nan)

    for name, fault in {'model.fused_attention': wrong_attention, 'train.Optimizer.step': wrong_step}.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, fault)
            with user_error('gives wrong results'):
                run_bench('--what=check')

# -- formats and the toy

def test_formats_have_their_known_limits():
    out = ' '.join(run_bench('--what=formats').split())
    for row in (
        'float32 | 8 bits | 23 bits | 3.4028e+38 | 1.4e-45 | 1.2e-07 |',
        'float16 | 5 bits | 10 bits | 65504 | 6e-08 | 0.00098 |',
        'bfloat16 | 8 bits | 7 bits | 3.3895e+38 | 9.2e-41 | 0.0078 |',
        'float8_e4m3fn | 4 bits | 3 bits | 448 | 0.002 | 0.12 |',
        'float8_e5m2 | 5 bits | 2 bits | 57344 | 1.5e-05 | 0.25 |',
    ):
        assert f'| {row}' in out

def test_the_toy_of_the_course_falls_faster_with_a_higher_rate_until_it_diverges():
    rows = table(run_bench('--what=toy'))
    assert train.RULES.keys() < rows.keys()
    losses = numbers(' '.join(rows['sgd']))
    assert losses == [*sorted(losses[:4], reverse=True), max(losses)]
    assert losses[3] < 1e-9         # at a rate of 100, the fourth step reaches the minimum

# -- what a model costs

def model_and_batch(name, dtype='float32', **fields):
    """Returns a model of a setting, not too small for rules of thumb, and a batch of 3 sequences."""
    c = small_config(name, block_size=32, n_embd=64, **fields)
    return bench.build(c, 'cpu', dtype), bench.random_batch(c, 3, 'cpu')

@every_setting
def test_parameters_and_flops_are_those_of_the_model_and_of_torch(name):
    from torch.utils.flop_counter import FlopCounterMode
    model, batch = model_and_batch(name, attention='naive')
    assert bench.parameters(model.config).total() == model.num_params()
    with FlopCounterMode(display=False) as forward:
        loss = model(*batch)
    padding = 2 * 32 * 64 * model.padding           # torch counts the padding
    ours = bench.forward_flops(model.config).total() + padding
    assert forward.get_total_flops() == 3 * ours
    assert model.flops_per_token(32) * 32 == 3 * (ours - padding)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()

def test_diagnose_refuses_a_model_with_another_softmax(monkeypatch):
    run = MLP.forward
    def route(mlp, x):
        return run(mlp, x * F.softmax(x, -1))
    monkeypatch.setattr('model.MLP.forward', route)
    model = small_gpt(attention='naive')
    with pytest.raises(ValueError, match='zip'):
        bench.diagnose(model, make_optimizer(model, 'sgd'), bench.random_batch(model.config, 3, 'cpu'))

def test_the_known_answers_about_gpt2_and_its_largest_form_are_given():
    out = run_bench('--what=resources --n_layer=48 --n_head=25 --n_embd=1600 --d_ff=6400 --tie_weights=False '
                    '--qk_norm=False --block_size=1024 --tokenizer=gpt2 --batch_size=1024 --micro_batch_size=1 '
                    '--max_iters=400000 --peak_tflops=19.5 --mfu=0.5')
    for answer in ('2,127,057,600', '1,474,560,000', '3,019,898,880,000', '322,122,547,200', '164,682,137,600',
                   '4,513,336,524,800', '6,584 days'):
        assert answer in out
    assert bench.parameters(GPTConfig(**GPT2)).total() == 124_439_808

@every_setting
@parametrize('attention, dtype', [
    ('flash', 'float32'),
    ('naive', 'float32'),
    ('naive', 'bfloat16'),
])
def test_memory_is_within_5_percent_of_what_autograd_keeps(name, attention, dtype):
    model, batch = model_and_batch(name, dtype, attention=attention)
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(*batch)        # noqa: F841
    for w in model.parameters():
        saved.pop(w.data_ptr(), None)
    guess = bench.memory(model.config, 3, dtype)
    not_saved = [guess.pop(part) for part in ('weights', 'gradients', 'moments', 'gradients of logits')]
    n = model.num_params()
    assert not_saved == [4 * n, 4 * n, 8 * n, 2 * 4 * 3 * 32 * model.config.vocab_size]
    assert guess.total() == pytest.approx(sum(saved.values()), rel=0.05)

def test_the_largest_batch_fits_and_one_more_does_not():
    out = run_bench('--what=resources --memory_gb=0.2 --n_layer=4')
    most = int(numbers_after('largest batch', out)[-1])
    c = small_config(vocab_size=257, n_layer=4)
    assert bench.memory(c, most, 'float32').total() <= 0.2e9 < bench.memory(c, most + 1, 'float32').total()
    out = run_bench('--what=resources --flop_budget=5.88e23 --tokens=15e12')
    assert 'best spent on 7e+10 parameters and 1.4e+12 tokens' in out      # Chinchilla itself

# -- tokenizers

def test_the_tokenizer_is_measured_beside_those_that_are_installed(monkeypatch):
    out = run_bench('--what=tokenizer --rounds=1')
    assert len(re.findall(': ours .* 1.00 x our time', out)) == 5
    assert out.count(': tiktoken') == 3
    for package in 'tokenizers', 'rustbpe', 'riptoken', 'tiktoken':
        monkeypatch.setitem(sys.modules, package, None)
    runpy.run_path(str(HERE / 'bench.py'))          # importing bench.py needs none of them

# -- diagnosis

def rms(tensors):
    """Returns the root mean square of all elements."""
    x = torch.cat([tensor.flatten() for tensor in tensors])
    return x.square().mean().item() ** 0.5

def test_a_look_into_a_model_finds_what_is_there(monkeypatch):
    model = small_gpt(n_kv_head=2, mlp='gelu', qk_norm=False, attention='naive')
    first, second = model.model.layers
    first.self_attn.q_proj.weight.data.zero_()          # zero queries attend to all tokens equally
    second.mlp.up_proj.weight.data[:16] = 0             # 16 of 128 units are dead
    second.self_attn.q_proj.weight.data *= 100          # attends to one token only
    outputs = []
    second.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    monkeypatch.setattr('train.grad_clip', 0)
    before = rms(second.parameters())
    optimizer = make_optimizer(model, 'sgd', weight_decay=0.0)
    a, b = bench.diagnose(model, optimizer, bench.random_batch(model.config, 3, 'cpu'))
    gradients = rms(w.grad for w in second.parameters())
    assert (a['entropy'], a['dead units']) == pytest.approx((1, 0), abs=1e-5)
    assert b.pop('entropy') < 0.3
    assert b == pytest.approx({
        'layer': 1,
        'activations': rms(outputs),
        'gradients': gradients,
        'rel. update': train.learning_rate * gradients / before,
        'dead units': 16 / 128,
    }, rel=1e-3)

def test_a_run_is_diagnosed_with_its_own_options_and_moments(monkeypatch):
    train_here('out/a', '--n_layer=3 --max_iters=6')
    diagnose, steps = bench.diagnose, []

    def see(model, optimizer, *args):
        steps.append(int(optimizer.t))
        return diagnose(model, optimizer, *args)

    monkeypatch.setattr('bench.diagnose', see)
    cells = table(run_bench('--what=diagnose out/a/config.py --vocab_size=280'))
    assert steps == [6]
    assert 0.5 < float(cells['2'][-1]) <= 1
    updates = [float(cells[layer][-3]) for layer in '012']
    assert min(updates) > 0.8 * max(updates)        # muon updates the matrices of all layers

# -- experiments

def made_up(name, *runs, **options):
    """Returns a variant whose runs had these losses; the last is full_val_loss."""
    variant = bench.Variant(name, ' '.join(f'--{option}={value}' for option, value in options.items()))
    for losses in runs:
        last = losses[-1]
        log = [dict(step=i, loss=loss, tokens_per_second=100.0 * i) for i, loss in enumerate(losses, 1)]
        log.append(dict(step=len(losses), full_val_loss=last, full_val_bpb=last / 2))
        variant.logs.append(log)
    return variant

def test_an_experiment_trains_every_variant_with_every_seed_and_goes_on_where_it_was(monkeypatch):
    write('small.py', 'n_embd = 16\n')
    options = '--max_iters=3 --optimizer=adamw'
    lab = f'--what=compare {options} --out_dir=out/lab --seeds=2 --seed=4'
    variants = 'as it is: ; small one: small.py --n_layer=1\n'
    rows = table(run_bench(lab, variants=variants))
    names = sorted(os.listdir('out/lab'))
    assert [re.sub('-[0-9a-f]{6}', '', name) for name in names] == ['as_it_is-4', 'as_it_is-5', 'curves.png',
                                                                     'small_one-4', 'small_one-5']
    small = load_model(Run(f'out/lab/{names[4]}').last).config
    assert (small.n_embd, small.n_layer) == (16, 1)
    # Each equals a run of train.py alone.
    alone = train_here('alone', f'{options} --n_head=4 --seed=5')
    assert Run(f'out/lab/{names[1]}').full_loss == pytest.approx(alone.full_loss)
    assert rows['as it is'][-1] == rows['small one'][-1] == '2 of 2'
    # Other options are other runs, and repeating one trains nothing.
    assert table(run_bench(f'{lab} --max_iters=4 --seeds=1', variants=variants)).keys() == rows.keys()
    assert len(os.listdir('out/lab')) == len(names) + 2
    monkeypatch.setattr('subprocess.run', pytest.fail)
    assert table(run_bench(lab, variants=variants)) == rows

def test_a_variant_that_diverges_does_not_end_the_others_and_one_that_fails_does():
    variants = 'ill: --learning_rate=1e38 --optimizer=sgd --grad_clip=0; well:'
    rows = table(run_bench('--what=compare --seeds=1 --max_iters=2', variants=variants))
    assert (rows['ill'][0], rows['ill'][-1]) == ('inf', '0 of 1')
    assert (rows['well'][0][:2], rows['well'][-1]) == ('5.', '1 of 1')
    with user_error('out/bad-.*-1: .* status 2: .*not a multiple'):
        run_bench('--what=compare', variants='bad: --batch_size=4 --micro_batch_size=3')

def test_curves_of_several_runs_are_one_table_and_one_picture():
    for name, last in ('a', 3), ('b', 2.5):
        [log] = made_up(name, (5, 4, last)).logs
        write(f'out/{name}/log.jsonl', '\n'.join(map(json.dumps, log)))
    cells = table(run_bench('--what=curves --runs=out/a,out/b'))
    assert cells['out/b'] == ['2.5000', '-0.5000', '1.250', '3', '200', '1 of 1']
    assert Path('out/curves.png').stat().st_size > 5000

# The best row is drawn last, at the top. Final losses are drawn capped at the first loss.
SPREAD = 0.5 ** 0.5
@parametrize('picture, want', [
    ('rows', [(9, 'y, far  400.000', 0), (4.5, 'x, low  4.500', SPREAD), (3, 'x, high  3.000', 0)]),
    ('learning_rate', [((0.01, 0.1), (4.5, 3), (SPREAD, 0), 'x'), ((1,), (9,), (0,), 'y')]),
    ('curves', [((1, 2), (9, 3), 'x, high'), ((1, 2), (9, 4), 'x, low'), ((1, 2), (9, 400), 'y, far')]),
])
def test_a_picture_shows_the_losses_at_the_end(picture, want, monkeypatch):
    from matplotlib.axes import Axes
    variants = [
        made_up('x, high', (9, 3), learning_rate=0.1),
        made_up('x, low', (9, 4), (9, 5), learning_rate=0.01),
        made_up('y, far', (9, 400), learning_rate=1.0),
    ]
    drawn, draw = [], Axes.errorbar

    def errorbar(axis, *numbers, fmt, **others):
        drawn.append((*numbers, *others.values()))
        draw(axis, *numbers, fmt=fmt, **others)

    monkeypatch.setattr('bench.read_variants', lambda: variants)
    monkeypatch.setattr(Axes, 'errorbar', errorbar)
    os.mkdir('out')
    run_bench(f'--what=compare --seeds=0 --picture={picture}')
    assert drawn == want

def test_a_law_of_scaling_is_found_again(printed):
    variants = []
    for layers, steps in itertools.product((1, 2, 4, 8), (10, 99, 999, 9999)):
        N = GPT(GPTConfig(n_layer=layers)).flops_per_token(0) / 6
        D = steps * 3 * 50
        losses = 9, 1.7 + 400 / N ** 0.5 + 900 / D ** 0.46
        variants.append(made_up('', losses, n_layer=layers, max_iters=steps, batch_size=3, block_size=50))
    bench.print_law(variants)
    assert 'loss = 1.70 + 400 / N^0.50 + 900 / D^0.46, off by 0.0%' in printed()
    with user_error('6 variants that ended with a loss, not 5'):
        bench.print_law(variants[:5])

MISTAKES = {*HERE.glob('config/broken_*.py')}
LABS = {*HERE.glob('config/lab_*.py')}
CONFIGS = {*HERE.glob('config/*.py')} - MISTAKES - LABS

def each_of(paths):
    return parametrize('path', sorted(paths), ids=lambda path: path.stem)

@each_of(CONFIGS)
def test_every_config_file_trains_a_step(path):
    line = f'train.py {path} {SMALL_RUN} --d_ff=0 --micro_batch_size=0 --init_from=scratch --max_iters=1 --out_dir=a'
    assert command(line) == 0
    assert len(Run('a').steps) == 1

@each_of(LABS)
def test_every_question_has_variants_that_can_be_read(path, monkeypatch):
    options = Options(bench.config.defaults)
    options.read([f'{HERE}/config/lab.py', str(path)])
    assert options['question']
    variants = re.sub('config/broken_.*.py', '', options['variants'])
    monkeypatch.setattr('bench.variants', variants)
    monkeypatch.chdir(HERE)
    assert len(bench.read_variants()) > 3

def test_every_tokenizer_of_its_question_is_trained_with():
    options = Options(bench.config.defaults)
    options.read([f'{HERE}/config/lab.py', f'{HERE}/config/lab_tokenizers.py'])
    for line in options['variants'].strip().splitlines():
        name, arguments = line.split(':')
        folder = name.replace(' ', '')
        line = f'{SMALL_RUN} --vocab_size={options["vocab_size"]} {arguments} --max_iters=1 --out_dir={folder}'
        assert command(f'train.py {line}') == 0
        assert Run(folder).full_loss

@each_of(MISTAKES)
def test_every_mistake_of_the_museum_changes_what_is_learned(path):
    options = '--max_iters=6' + ' --dtype=float16' * (path.stem == 'broken_no_scale')
    healthy = train_here('a', options)
    # It runs in its own process, so that it breaks nothing else.
    assert status_of(start_alone(f'train.py {SMALL_RUN} {options} --out_dir=b {path}')) == 0
    losses = Run('b').losses
    assert len(losses) == 6
    assert losses != healthy.losses

def test_bench_can_read_all_mistakes_in_one_process():
    mistakes = ' '.join(map(str, sorted(MISTAKES)))
    assert status_of(start_alone(f'train.py {SMALL_RUN} --max_iters=1 --out_dir=a {mistakes}')) == 0

# -----------------------------------------------------------------------------
# end to end, in separate processes

def start_alone(line, rank=0, **env):
    """Starts a script in its own process, forked if possible so that it need not import torch again."""
    context = torch.multiprocessing.get_context(START_METHOD)
    process = context.Process(target=run_alone, args=(line, rank, env))
    write(f'said{rank}.txt', '')
    process.start()
    return process

def run_alone(line, rank, env):
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    # A shell makes background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stderr = open(f'said{rank}.txt', 'w')
    status = command(line)
    sys.stdout = sys.stderr = None      # otherwise its exit would retry output that failed
    sys.exit(status)

def free_port():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return str(free.getsockname()[1])

def start_ranks(line, n, other=''):
    """Starts n processes that train together. other: extra arguments of the last one."""
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port())
    lines = [line] * (n - 1) + [f'{line} {other}']
    return [start_alone(line, rank, **env) for rank, line in enumerate(lines)]

def status_of(process):
    """Returns the exit status of a process, which must end within 30 seconds."""
    process.join(30)
    status = process.exitcode
    process.kill()
    return status

def said():
    """Returns what rank 0 has printed."""
    return Path('said0.txt').read_text()

def wait_for(process, text):
    """Waits until rank 0 has printed this text."""
    deadline = time.monotonic() + 60
    while text not in said():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)

# This config file runs before training, disables plots, and adds a fault to each batch.
FAULTS = '''
import os, pathlib, prepare, resource, signal, sys, time
sys.modules['matplotlib.figure'] = None
_batch, _seen = prepare.Shards.batch, []

def die_once():
    if not os.path.exists('killed'):
        pathlib.Path('killed').touch()
        os.kill(os.getpid(), signal.SIGKILL)

def _faulty_batch(self, *args):
    _seen.append(1)
    FAULT
    return _batch(self, *args)

prepare.Shards.batch = _faulty_batch
'''

def write_faults(fault):
    write('faults.py', FAULTS.replace('FAULT', fault))

def test_training_on_a_text_and_sampling_need_nothing_but_their_commands(printed):
    small = '--vocab_size=300 --n_embd=32 --n_head=2 --block_size=32 --max_iters=40 --eval_interval=20 --device=cpu'
    done = launch(HERE / 'train.py', '--dataset=corpus.txt', *small.split())
    run = Run('out/corpus')
    assert run.kept == [20, 40]
    assert run.val_losses[1] < run.val_losses[0]
    assert Path('out/corpus/curves.png').stat().st_size > 5000
    line = re.search(r'python .*/(sample\.py .*)', done.stdout)[1]
    printed()
    assert command(f'{line} --start=def --max_new_tokens=20') == 0
    assert printed().startswith('def')

@parametrize('n, dtype, error', [(2, 'float32', 1e-5), (4, 'float32', 1e-5), (2, 'bfloat16', 3e-3),
                                 (2, 'float16', 3e-3)])
def test_several_processes_compute_what_one_does(n, dtype, error):
    options = f'--max_iters=12 --eval_interval=6 --dropout=0.1 --micro_batch_size=2 --dtype={dtype}'
    one = train_here('a', options)
    ranks = start_ranks(f'train.py {SMALL_RUN} {options} --out_dir=b', n)
    assert [status_of(process) for process in ranks] == [0] * n
    run = Run('b')
    near(run.losses, one.losses, error)
    near([entry['grad_norm'] for entry in run.steps], [entry['grad_norm'] for entry in one.steps], 10 * error)
    near(run.full_loss, one.full_loss, error)

def test_a_run_killed_at_any_moment_ends_as_one_that_was_not():
    options = '--max_iters=100 --eval_interval=5 --dropout=0.1'
    straight = train_here('a', options)
    for _ in range(3):
        process = start_alone(f'train.py {SMALL_RUN} {options} --out_dir=b --init_from=auto')
        time.sleep(random.SystemRandom().uniform(0.1, 0.7))
        process.kill()
        process.join()
    resumed = train_here('b', f'{options} --init_from=auto')
    assert resumed.bits == straight.bits
    assert resumed.losses == straight.losses

STEPS = '--max_iters=60 --dropout=0.1 --micro_batch_size=4'

@not_windows
@parametrize('n, kind', [
    (1, signal.SIGTERM),
    (1, signal.SIGINT),
    (2, signal.SIGTERM),
])
def test_a_signal_to_the_last_process_stops_all_with_a_checkpoint_and_nothing_is_lost(n, kind):
    straight = train_here('a', STEPS)
    write_faults('time.sleep(0.02)')
    line = f'train.py {SMALL_RUN} {STEPS} --out_dir=b'
    ranks = start_ranks(f'{line} faults.py', n)
    wait_for(ranks[0], '\nstep 3 ')
    refused = refusal(f'{line} --init_from=auto')       # no other process may train there
    assert 'another process works in b; if none does, remove b/.lock, else use another --out_dir' in refused
    os.kill(ranks[-1].pid, kind)
    assert [status_of(process) for process in ranks] == [128 + kind] * n
    step = Run('b').kept[0]
    assert 3 <= step < 60
    assert f'stopped at step {step};' in said()
    resumed = train_here('b', f'{STEPS} --init_from=resume')
    assert resumed.bits == straight.bits

def start_hanging(step):
    """Starts a run that hangs in this step."""
    write_faults(f"if len(_seen) == {step}: print('hangs', flush=True); time.sleep(60)")
    process = start_alone(f'train.py {SMALL_RUN} faults.py --out_dir=a')
    wait_for(process, 'hangs')
    return process

@not_windows
def test_a_second_ctrl_c_ends_it_at_once():
    process = start_hanging(2)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    assert status_of(process) == 130

@not_windows
def test_a_signal_in_the_last_evaluation_is_not_lost():
    write_faults('if len(_seen) == 3: os.kill(os.getpid(), signal.SIGTERM)')
    assert status_of(start_alone(f'train.py {SMALL_RUN} faults.py --max_iters=2 --out_dir=a')) == 128 + signal.SIGTERM
    assert Run('a').kept == [2]

@not_windows
def test_a_signal_in_the_evaluation_of_the_whole_split_exits_at_once():
    write_faults('if len(_seen) == 4: os.kill(os.getpid(), signal.SIGINT)')
    assert status_of(start_alone(f'train.py {SMALL_RUN} faults.py --max_iters=2 --out_dir=a')) == 130
    assert Run('a').kept == [2] and Run('a').full_loss is None

@not_windows
def test_a_signal_in_a_slow_step_is_answered_at_once_and_saved_after_that_step():
    write_faults('time.sleep(1.5)')
    ranks = start_ranks(f'train.py {SMALL_RUN} faults.py --out_dir=a', 2)
    wait_for(ranks[0], '\nstep 2 ')
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert 'a checkpoint is saved after this step' in said()
    assert [status_of(process) for process in ranks] == [128 + signal.SIGTERM] * 2
    assert Run('a').kept == [3]

NOBODY_READS = {
    'pipe': 'r, w = os.pipe(); os.close(r); os.dup2(w, sys.stdout.fileno())',
    'full disk': "os.dup2(os.open('/dev/full', os.O_WRONLY), sys.stdout.fileno())",
}

@pytest.mark.skipif(not Path('/dev/full').exists(), reason='only Linux has /dev/full')
@parametrize('lose', NOBODY_READS.values(), ids=NOBODY_READS)
def test_a_run_that_can_not_print_goes_on_and_still_hears_that_its_terminal_closes(lose):
    straight = train_here('a', STEPS)
    write_faults(f'if len(_seen) == 5: {lose}')
    line = f'train.py {SMALL_RUN} {STEPS} faults.py'
    assert status_of(start_alone(f'{line} --out_dir=b')) == 0
    run = Run('b')
    assert run.bits == straight.bits
    assert 'step 60' not in said()
    process = start_alone(f'{line} --out_dir=c --max_iters=100000')
    while not any(step > 60 for step, _ in train.points(train.read_log(Path('c')), 'loss')):
        assert process.is_alive()
    os.kill(process.pid, signal.SIGHUP)
    assert status_of(process) == 128 + signal.SIGHUP
    assert Run('c').kept

# options of two processes | more options of the last one | word in the error
NOT_SHARED = '''
--out_dir=d | --out_dir=d --seed=2 | seed
--out_dir=d | --out_dir=d --dataset=other | data
--out_dir=b | --out_dir=c | checkpoint
--out_dir=d --dtype=auto fast.py | slow.py | dtype
'''

def test_processes_that_do_not_share_everything_stop_before_they_train():
    for folder in 'b', 'c':
        train_here(folder, f'--max_iters=2 --learning_rate={ord(folder)}e-5')
    data_folder('corpus-byte').rename('here')
    shutil.copytree('here', 'copy')
    write_corpus('corpus.txt', 29)
    find_or_prepare('corpus.txt', 'byte').rename('other')
    for name, fast in dict(fast=True, slow=False).items():          # two kinds of devices, for which 'auto' differs
        write(f'{name}.py', f'import model\nmodel.has_fast_bfloat16 = lambda: {fast}')
    for first, last, says in rows(NOT_SHARED):
        ranks = start_ranks(f'train.py {SMALL_RUN} --init_from=auto --dataset=here {first}', 2, last)
        assert [status_of(process) for process in ranks] == [2, 2]
        line = said().splitlines()[-1]
        assert line.startswith(f'error: the processes differ in {says}: ')
    assert not any(Path('d').glob('step*'))
    ranks = start_ranks(f'train.py {SMALL_RUN} --max_iters=2 --dataset=here --out_dir=d', 2, '--dataset=copy')
    assert [status_of(process) for process in ranks] == [0, 0]

@not_windows
def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays():
    old = train_here('b', '--max_iters=4 --eval_interval=2')
    write_faults('resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))')
    options = '--max_iters=12 --eval_interval=4 --keep_checkpoints=1 --init_from=resume'
    assert status_of(start_alone(f'train.py {SMALL_RUN} faults.py {options} --out_dir=b')) == 2
    assert 'training goes on' in said()
    assert 'error: b/step_00000012 cannot be saved' in said().splitlines()[-1]
    assert Run('b').bits == old.bits
    assert Run('b').kept == [2, 4]          # a failed save removes no checkpoint
    assert not any(Path('b').glob('.step*'))
    assert status_of(start_alone(f'train.py {SMALL_RUN} faults.py --max_iters=1 --out_dir=c')) == 2
    assert 'make room, then repeat the command with --init_from=auto' in said()

# These replace torchrun and Slurm, which starts a command on each of two nodes and forwards signals.
COMMANDS = {
    'torchrun': f'exec {sys.executable} -m torch.distributed.run "$@"',
    'srun': '"$@" & a=$!; "$@" & b=$!; trap "kill $a $b; wait $a $b" TERM; wait $a && wait $b',
    'scontrol': 'if [ $1 = show ]; then echo localhost; else touch queued; fi',
}

def start_job(block, options):
    """Starts a script that restarts processes, with a small run."""
    for name, text in COMMANDS.items():
        write(name, f'#!/bin/bash\n{text}\n')
        Path(name).chmod(0o755)
    changes = {
        'train.py config/train_gpt2.py': f'{HERE}/train.py {SMALL_RUN} {options} faults.py',
        'out/gpt2': 'b',
        '29500': free_port(),
        'node=8': 'node=1' if 'srun' in block else 'node=2',
    }
    for old, new in changes.items():
        block = block.replace(old, new)
    slurm = dict(SLURM_NNODES='2', SLURM_JOB_ID='7', SLURM_JOB_NODELIST='')
    env = {**os.environ, **slurm, 'PATH': f'.:{os.environ["PATH"]}', 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen(['bash', '-c', block], env=env)

@not_windows
@parametrize('nodes', [1, 2])
def test_a_job_as_it_is_documented_survives_a_killed_process_and_is_queued_again(nodes):
    options = f'{STEPS} --eval_interval=10'
    straight = train_here('a', options)
    blocks = re.findall(r'^```sh\n(.*?)^```', (HERE / 'README.md').read_text(encoding='utf-8'), re.M | re.S)
    [block] = [text for text in blocks if '--max-restarts' in text]
    assert block.count('train.py') == 1         # only this command gets the fault
    if nodes == 2:
        block = (HERE / 'config/slurm.sh').read_text(encoding='utf-8')
    write_faults("time.sleep(0.03)\n    if len(_seen) == 30 and os.environ['RANK'] == '1': die_once()")
    job = start_job(block, options)
    if nodes == 2:          # Slurm's time limit is near
        while not (Path('killed').exists() and train.read_log(Path('b'))[-1]['step'] > 32):
            assert job.poll() is None
        job.send_signal(signal.SIGUSR1)
        job.wait(60)
        assert Path('queued').exists()
        assert Run('b').kept[-1] < 60
        job = start_job(block, options)
    assert job.wait(120) == 0
    assert Path('killed').exists()
    assert Run('b').bits == straight.bits

# wrong command | text in the error
BAD_INPUT = '''
train.py --bach_size=4 | batch_size
train.py --batch_size=four | a whole number
train.py --batch_size | such as --batch_size=16
train.py --learning_rate=inf | a number
train.py --bias=1 | True or False
train.py --zzz=1 | --help
train.py --gradient_accumulation_steps=8 | batch_size counts
train.py stray | stray
train.py config/nope.py | config/nope.py
train.py broken.py | broken.py, line 2
train.py --dataset=no/such.txt | no/such.txt
train.py --dataset=small.txt --tokenizer=byte | small
train.py --init_from=nowhere | nowhere
train.py --init_from=resume --out_dir=a | resume
train.py --device=cuda | --device=cpu
train.py --dtype=int8 | dtype
train.py --n_head=3 --n_embd=128 | n_head
train.py --norm=batch | norm
train.py --optimizer=adamx | adamw
train.py --lr_decay=step | linear
train.py --batch_size=6 --micro_batch_size=4 | use --batch_size=8
train.py --grad_clip=-1 | grad_clip = -1.0 is not at least 0; change --grad_clip
train.py --sample_tokens=-1 | sample_tokens = -1 is not
train.py --lr_decay_iters=9 | reaches min_lr at max_iters
sample.py | python train.py
sample.py --out_dir=nowhere | nowhere
sample.py --temperature=-1 | error: temperature = -1.0 is not at least 0
sample.py --top_p=-1 | top_p
prepare.py --dataset=empty.txt | split is empty
prepare.py --dataset=letter.txt | split is empty
prepare.py --dataset=letter.txt --tokenizer=byte | split is empty
prepare.py --dataset= | no text at ''
prepare.py --dataset=code/**.txt | 'code/**.txt'
prepare.py --dataset=small.txt --val_dataset=no/such.txt | no text at 'no/such.txt'
prepare.py --dataset=small.txt --val_dataset=small.txt | train split is empty; use more text, rename files (see --help)
prepare.py --dataset=tests | train split is empty
prepare.py --dataset=latin.txt | latin.txt is not text in UTF-8 (see byte 1); convert it
prepare.py --dataset=latin | latin/b.txt is not text in UTF-8 (see byte 1); convert it
prepare.py --dataset=utf16.txt | utf16.txt is not text in UTF-8 (see byte 1); convert it
prepare.py --dataset=a.ZIP | a.ZIP is not text in UTF-8 (see byte 4)
prepare.py --dataset=late.txt | late.txt is not text in UTF-8 (see byte 30,000)
prepare.py --dataset=no_field.jsonl | row 1 of no_field.jsonl has no text in 'text' (fields: a, b); use another
prepare.py --dataset=messages.jsonl --text_field=messages | row 1 of messages.jsonl has no text in 'messages' (
prepare.py --dataset=half.jsonl | row 2 of half.jsonl has no text
prepare.py --dataset=zero.jsonl | row 2 of zero.jsonl has no text
prepare.py --dataset=strings.json | row 1 of strings.json has no text in 'text' (fields: none)
prepare.py --dataset=under_key.json | (fields: data)
prepare.py --dataset=broken.jsonl | cannot read row 2 of broken.jsonl (JSON
prepare.py --dataset=indented.json | cannot read row 1 of indented.json (JSON
prepare.py --dataset=latin.jsonl | cannot read row 1 of latin.jsonl (UnicodeDecodeError: 'utf-8' codec can't decode
prepare.py --dataset=latin.csv | row 1 of latin.csv (UnicodeDecodeError
prepare.py --dataset=comma.csv | cannot read row 1 of comma.csv (Error: it does not have as many fields as the header
prepare.py --dataset=semicolon.csv | row 1 of semicolon.csv has no text in 'text' (fields: id;text)
prepare.py --dataset=short.csv | cannot read row 2 of short.csv (Error: it does not have as many fields as the header
prepare.py --dataset=rows.tsv | cannot read row 1 of rows.tsv (Error: a quote joins rows
prepare.py --dataset=quote.tsv | cannot read row 2 of quote.tsv (Error:
prepare.py --dataset=stray.csv | cannot read row 1 of stray.csv (Error: ',' expected
prepare.py --dataset=nonsense.parquet | cannot read row 1 of nonsense.parquet (ArrowInvalid
prepare.py --dataset=a.parquet --text_field=c | row 1 of a.parquet has no text in 'c' (fields: a, b)
prepare.py --dataset=nonsense.txt.zst | cannot read nonsense.txt.zst (
prepare.py --dataset=cut.gz | cannot read cut.gz (EOFError
prepare.py --dataset=cut.txt.zst | cannot read cut.txt.zst (EOFError
prepare.py --dataset=cut | val.bin
prepare.py --dataset=small.txt --workers=-1 | workers
prepare.py --dataset=small.txt --vocab_size=256 | vocab_size
prepare.py --dataset=small.txt --tokenizer=bep | bep
prepare.py --dataset=small.txt --tokenizer=bad.json | bad.json
prepare.py --dataset=small.txt --tokenizer=list.json | list.json ('list' object is not a mapping)
prepare.py --dataset=small.txt --pattern=gpt3 | gpt3
prepare.py --dataset=small.txt --val_fraction=1 | val_fraction
prepare.py --dataset=small.txt --shard_tokens=0 | shard_tokens
prepare.py --dataset=small.txt --separator=n | in the shell; quote it, as in --separator=
bench.py --what=nonsense | nonsense
bench.py --what=compare | no variants to compare
bench.py --what=compare --variants=a:;b:--n_emb=3 | did you mean n_embd
bench.py --what=curves | use run folders
bench.py --what=curves --runs=nowhere | use run folders
'''
BAD_FILES = {
    'empty.txt': b'',
    'letter.txt': b'a',
    'small.txt': b'a few words ' * 10,
    'latin.txt': b'd\xe9j\xe0 vu ' * 1000,
    'latin/a.txt': b'a',
    'latin/b.txt': b'd\xe9j\xe0 vu',
    'latin.csv': b'text\nd\xe9j\xe0\n',
    'latin.jsonl': b'{"text": "d\xe9j\xe0"}\n',
    'utf16.txt': 'a text'.encode('utf-16-le'),
    'late.txt': b'a word, and ' * 2500 + b'\0',
    'a.ZIP': b'PK\3\4\0\0',
    'tests/test.txt': b'a',
    'tests/val.txt': b'a',
    'no_field.jsonl': b'{"a": 1, "b": 2}\n',
    'messages.jsonl': b'{"messages": [{"role": "user"}]}',
    'half.jsonl': b'{"text": "a"}\n{"text": "\\ud83d"}',
    'zero.jsonl': b'{"text": "a"}\n{"text": 0}\n',
    'strings.json': b'["a", "b"]',
    'under_key.json': b'{"data": [{"text": "a"}]}',
    'broken.jsonl': b'{"text": "a"}\n\n{"text": "b"\n',
    'indented.json': b'{\n "text": "a"\n}',
    'comma.csv': b'text\nwell, well\n',
    'semicolon.csv': b'id;text\n1;a\n',
    'short.csv': b'id,text\n1,a line\nand another\n',
    'rows.tsv': b'id\ttext\n1\t"I came\n2\thome."\n',
    'stray.csv': b'text\n"a" b\n',
    'quote.tsv': b'id\ttext\n1\ta\n2\t"b\n3\tso "called"\n',
    'nonsense.parquet': b'nonsense',
    'nonsense.txt.zst': b'nonsense',
    'cut.gz': gzip.compress(b'a' * 999)[:-9],
    'cut/train.bin': b'\0\0' * 999,
    'bad.json': b'{"version": "1.0"}',
    'list.json': b'[]',
    'broken.py': b'seed = 1\nbatch_size = \n',
}

@parametrize('line, says', rows(BAD_INPUT))
def test_what_a_person_gets_wrong_is_one_line_and_status_2(line, says):
    for name, data in BAD_FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)
    if 'cut.txt.zst' in line:
        zstd = importlib.import_module(prepare.COMPRESSIONS['.zst'])
        Path('cut.txt.zst').write_bytes(zstd.compress(bytes(range(97, 120)) * 9999)[:-9])
    if 'a.parquet' in line:
        from pyarrow import parquet, table
        parquet.write_table(table(dict(a=['a'], b=['b'])), 'a.parquet')
    assert says in refusal(line)
    assert not any(Path('out').glob('*/*.py'))
    assert not left() or 'train.py' in line

def test_the_readme_names_files_that_exist_and_lists_them_all():
    text = (HERE / 'README.md').read_text(encoding='utf-8')
    scripts = {path.name for path in HERE.glob('*.py')}
    assert scripts <= set(re.findall(r'`(\w+\.py)`', text))
    commands = re.findall(r'^ *(?:python|torchrun .*?) (\w+\.py)', text, re.M)
    files = re.findall(r'config/\w+\.py|assets/\w+\.png', text)
    for name in commands + files:
        assert (HERE / name).exists(), name

# -----------------------------------------------------------------------------
# a course's own test suite: that of Stanford's CS336, assignment 1 (spring 2025, commit 25a8a49). The same adapter
# works with version 26.0.3 of the assignment (April 2026), where 37 of 48 tests pass and the rest need large files. To
# run either on our code, put these lines into its tests/adapters.py:
#
#     import sys
#     sys.path.insert(0, '../plaingpt')       # where this repository is
#     from test_all import *

COURSE_NAMES = '''
token_embeddings | model.embed_tokens
layers. | model.layers.
ln_final | model.norm
ln1 | input_layernorm
ln2 | post_attention_layernorm
attn. | self_attn.
output_proj | o_proj
ffn.w1 | mlp.gate_proj
ffn.w2 | mlp.down_proj
ffn.w3 | mlp.up_proj
'''

class CourseGPT(GPT):
    pad_to = 1      # keeps the vocabulary size

def filled(module, weights, heads=0):
    """Returns our module with the course's weights. heads: the number of query and key heads that rope rotates."""
    ours = {}
    for name, w in weights.items():
        for theirs, mine in rows(COURSE_NAMES):
            name = name.replace(theirs, mine)
        if heads and name.endswith(('q_proj.weight', 'k_proj.weight')):
            w = w.unflatten(0, (heads, -1))
            w = w[:, even_then_odd(w.size(1))].flatten(0, 1)
        ours[name] = w
    module.load_state_dict(ours)
    return module

def even_then_odd(d):
    """Returns the order that turns the course's pairs (x[2i], x[2i+1]) into our pairs (x[i], x[i + d/2])."""
    return torch.arange(d).view(-1, 2).T.flatten()

def course_angles(d, theta, positions):
    """Returns cos and sin (..., T, 1, d/2) of positions (..., T), the same for all heads."""
    tables = rope_angles(positions.flatten(), d, theta)
    return [table.view(*positions.shape, 1, d // 2) for table in tables]

def course_config(**fields):
    return GPTConfig(qk_norm=False, tie_weights=False, **fields)

def run_linear(d_in, d_out, weights, in_features):
    return filled(Linear(d_in, d_out), {'weight': weights})(in_features)

def run_embedding(vocab_size, d_model, weights, token_ids):
    return filled(Embedding(vocab_size, d_model), {'weight': weights})(token_ids)

def run_rmsnorm(d_model, eps, weights, in_features):
    return filled(RMSNorm(d_model, eps), {'weight': weights})(in_features)

def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    weights = {'gate_proj.weight': w1_weight, 'down_proj.weight': w2_weight, 'up_proj.weight': w3_weight}
    mlp = MLP(course_config(n_embd=d_model, n_head=1, d_ff=d_ff))
    return filled(mlp, weights)(in_features)

def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return scaled_dot_product_attention(Q, K, V, mask)

def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    order = even_then_odd(d_k)
    cos, sin = course_angles(d_k, theta, token_positions)
    x = in_query_or_key[..., order]
    turned = apply_rope(x, cos.squeeze(-2), sin.squeeze(-2))
    return turned[..., order.argsort()]

def run_multihead_self_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight,
                                 in_features, angles=None):
    weights = {'q_proj.weight': q_proj_weight, 'k_proj.weight': k_proj_weight, 'v_proj.weight': v_proj_weight,
               'o_proj.weight': o_proj_weight}
    attention = Attention(course_config(n_embd=d_model, n_head=num_heads))
    return filled(attention, weights, num_heads if angles else 0)(in_features, alone(angles))

def run_multihead_self_attention_with_rope(d_model, num_heads, max_seq_len, theta, q_proj_weight, k_proj_weight,
                                           v_proj_weight, o_proj_weight, in_features, token_positions=None):
    if token_positions is None:
        token_positions = torch.arange(in_features.size(-2))
    angles = course_angles(d_model // num_heads, theta, token_positions)
    return run_multihead_self_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight,
                                        o_proj_weight, in_features, angles)

def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    config = course_config(n_embd=d_model, n_head=num_heads, d_ff=d_ff)
    positions = torch.arange(in_features.size(1))
    angles = course_angles(d_model // num_heads, theta, positions)
    return filled(Block(config), weights, num_heads)(in_features, alone(angles))

def run_transformer_lm(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights,
                       in_indices):
    config = course_config(block_size=context_length, vocab_size=vocab_size, n_layer=num_layers, n_head=num_heads,
                           n_embd=d_model, d_ff=d_ff, rope_theta=rope_theta)
    return filled(CourseGPT(config), weights, num_heads)(in_indices)

def run_get_batch(dataset, batch_size, context_length, device):
    """Draws random sequences; train.py instead reads each one once per epoch."""
    starts = torch.randint(len(dataset) - context_length, (batch_size, 1))
    rows = torch.from_numpy(dataset)[starts + torch.arange(context_length + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]

def run_gradient_clipping(parameters, max_l2_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = sum(g.square().sum() for g in grads).sqrt()
    for g in grads:
        g.mul_((max_l2_norm / (norm + 1e-6)).clamp(max=1.0))

class CourseAdamW(optim.Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group['params']:
                state = self.state[p] or dict(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                self.state[p] = self.update(p, **state, **group)

    def update(self, p, t, m, v, lr, betas, eps, weight_decay, **other):
        t += 1
        corrections = [1 - beta ** t for beta in betas]
        train.adamw(p, p.grad, lr, weight_decay, m, v, *betas, eps, *corrections)
        return dict(t=t, m=m, v=v)

def run_get_lr_cosine_schedule(it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters):
    with train_options(learning_rate=max_learning_rate, min_lr=min_learning_rate, warmup_iters=warmup_iters,
                       max_iters=cosine_cycle_iters, lr_decay='cosine'):
        return train.get_lr(it, last=(it - 1) * max_learning_rate / warmup_iters)

def run_save_checkpoint(model, optimizer, iteration, out):
    """Saves a pickle; our own checkpoint is a folder that Hugging Face opens."""
    torch.save((model.state_dict(), optimizer.state_dict(), iteration), out)

def run_load_checkpoint(src, model, optimizer):
    weights, moments, iteration = torch.load(src)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return iteration

def get_adamw_cls():
    return CourseAdamW

run_silu, run_softmax, run_cross_entropy = silu, softmax, cross_entropy
run_train_bpe = train_bpe

def get_tokenizer(vocab, merges, special_tokens=None):
    tok = Tokenizer(vocab, merges, special_tokens)
    tok.encode_iterable = partial(encode_iterable, tok)
    return tok

def encode_iterable(tok, chunks, size=1 << 16):
    """Yields the ids of tok.encode(''.join(chunks)) as they come. Buffers `size` bytes, more if no cut is safe."""
    for block in tokenizer.blocks(map(str.encode, chunks), size, tok.special_ids):
        yield from tok.encode(block.decode())

# tests of these adapters: each is compared with torch's functions, or with earlier adapters

def test_the_adapter_for_rope_turns_neighbors_as_complex_numbers():
    x = torch.randn(4, 8)
    positions = torch.tensor([3, 1, 4, 1])
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    turned = torch.view_as_real(pairs * torch.exp(1j * angles))
    near(run_rope(8, 100.0, 16, x, positions), turned.flatten(-2), 1e-5)

def test_the_adapters_for_a_course_compute_its_transformer():
    d, heads, d_ff, vocab = 24, 3, 64, 1100
    matrices = 0.3 * torch.randn(4, d, d)
    w1, w3 = 0.3 * torch.randn(2, d_ff, d)
    ln1, ln2, ln = torch.randn(3, d)
    head = torch.randn(vocab, d)
    idx = torch.randint(vocab, (2, 5))
    positions = torch.arange(5)

    x = run_embedding(vocab, d, head, idx)
    h = run_rmsnorm(d, 1e-5, ln1, x)
    q, k, v = [run_linear(d, d, w, h).unflatten(-1, (heads, -1)).transpose(1, 2) for w in matrices[:3]]
    q, k = [run_rope(d // heads, 100.0, 16, y, positions) for y in (q, k)]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ matrices[3].T
    attend = partial(run_multihead_self_attention_with_rope, d, heads, 16, 100.0, *matrices, h)
    near(attend(), y, 1e-4)
    near(run_multihead_self_attention(d, heads, *matrices, h), attend(0 * positions), 1e-4)

    y = x + y
    h = run_rmsnorm(d, 1e-5, ln2, y)
    mlp = (F.silu(h @ w1.T) * (h @ w3.T)) @ w1
    near(run_swiglu(d, d_ff, w1, w1.T, w3, h), mlp, 1e-4)
    y = y + mlp
    names = 'attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3 ln1 ln2'.split()
    weights = {f'{name}.weight': w for name, w in zip(names, [*matrices, w1, w1.T, w3, ln1, ln2])}
    near(run_transformer_block(d, heads, d_ff, 16, 100.0, weights, x), y, 1e-4)

    weights = {f'layers.0.{name}': w for name, w in weights.items()}
    weights |= {'token_embeddings.weight': head, 'lm_head.weight': head, 'ln_final.weight': ln}
    logits = run_transformer_lm(vocab, 16, d, 1, heads, d_ff, 100.0, weights, idx)
    near(logits, run_rmsnorm(d, 1e-5, ln, y) @ head.T, 1e-3)

def test_the_adapters_for_a_course_train():
    ours, theirs = two_models()
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = get_adamw_cls()(ours.parameters(), **options)
    torchs_own = optim.AdamW(theirs.parameters(), **options)
    for step in range(20):
        draw_gradients(ours, theirs)
        run_gradient_clipping(ours.parameters(), step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), step)
        optimizer.step()
        torchs_own.step()
        run_save_checkpoint(ours, optimizer, step, 'saved')
        assert run_load_checkpoint('saved', ours, optimizer) == step
    near_weights(ours, theirs, 1e-6)
