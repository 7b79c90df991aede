"""
Run me with pytest: python -m pytest test_all.py

No network, no GPU, no data set. The sections are those of the files: configurator, tokenizer, prepare, model, train,
sample, bench, and then everything from end to end. A test compares with something that can be trusted (torch, tiktoken,
transformers, the plain form, a file on disk) or checks a property that has to hold.
"""
import ast
import contextlib
import copy
import functools
import gzip
import hashlib
import http.server
import importlib.util
import itertools
import json
import lzma
import math
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import configurator
import model as model_module
import prepare as prepare_module
import sample as sample_module
import tokenizer as tokenizer_module
import train as train_module
from configurator import UserError, configure
from model import GPT, GPT2, GPTConfig
from tokenizer import (END_OF_TEXT, PATTERNS, ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer, load_tokenizer,
                       plain_encode, plain_train, train_bpe)

LONG = bool(os.environ.get('LONG'))         # python test_all.py --long: hundreds of cases where a few are tried otherwise
os.environ['CUDA_VISIBLE_DEVICES'] = ''     # the reference everywhere is the CPU
torch.set_num_threads(1)                    # these models are too small for more
LONG = bool(os.environ.get('LONG'))

def script(name, *args):
    """A script of ours as a fresh module, with its knobs set as the arguments would."""
    spec = importlib.util.spec_from_file_location(name, HERE / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    others = []
    if name == 'bench':
        module.train = script('train')
        others = [vars(module.train)]
    module.config.update(configure(vars(module), *others, argv=[str(a) for a in args]))
    if others:
        module.train.config.update({k: v for k, v in module.config.items() if k in module.train.config})
    return module

def launch(*args, check=None, **env):
    """Runs `python <args>` in a process of its own, as a person would."""
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, timeout=300,
                          env=dict(os.environ, OMP_NUM_THREADS='1', **env))
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done

def one_line(done):
    """That a run ended with status 2 and one line on stderr; returns the line."""
    assert done.returncode == 2, done.stdout + done.stderr
    return error_line(done.stderr)

def error_line(text):
    lines = text.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: ') and lines[0].isprintable(), text
    return lines[0]

@contextlib.contextmanager
def at_most(megabytes):
    """This process may take so much more memory than it has, where the system can be told so."""
    if sys.platform != 'linux':
        return (yield)
    import resource
    before, now = resource.getrlimit(resource.RLIMIT_AS), int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

STEERING = '\x1b[31m\x07\x9b2J\u202e'       # red, a bell, an empty screen, from right to left

NASTY_JSON = [None, True, False, 0, -1, 1, 7, 16, 50, 2 ** 31, 2 ** 40, 2 ** 62, 10 ** 9, 10 ** 20, 10 ** 400, -10 ** 400, 0.5, 1e-300, 1e300, math.nan,
              math.inf, -math.inf, '', 'x', '3', STEERING, '\ud800', [], {}, [1], [[[]]], {'a': 1}, {'rope_type': 'yarn'}, [None]]

def places(data, at=()):
    """The way to every value inside of JSON: (key, index, ...)"""
    for key, value in data.items() if type(data) is dict else enumerate(data) if type(data) is list else ():
        yield (*at, key)
        yield from places(value, (*at, key))

def mutated(rng, data):
    """JSON with some values replaced by nasty ones, or left out."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *path, key = rng.choice([*places(data)] or [('',)])
        part = functools.reduce(lambda part, key: part[key], path, data)
        if key in part and type(part) is dict and rng.random() < 0.2:
            del part[key]
        elif key != '':
            part[key] = copy.deepcopy(rng.choice(NASTY_JSON))
    return data

STARTED = []        # pids of forks that have not ended

@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every test runs in an empty folder, without a network, and leaves signals as they were."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    random.seed(0)
    connect = socket.socket.connect
    def local(self, address):
        if self.family != getattr(socket, 'AF_UNIX', None) and address[0] not in ('127.0.0.1', 'localhost', '::1'):
            raise AssertionError(f'a test asks for {address}, and none may need a network')
        return connect(self, address)
    monkeypatch.setattr(socket.socket, 'connect', local)
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}
    signal.signal(signal.SIGINT, signal.default_int_handler)        # a shell ignores it for what runs in the background
    yield
    mock.patch.stopall()        # by files such as config/broken_no_mask.py
    while STARTED:      # processes of a test that failed
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid := STARTED.pop(), signal.SIGKILL)
            os.waitpid(pid, 0)
    if configurator.StopSignal.current:
        configurator.StopSignal.current.end()
    for s, handler in handlers.items():
        if signal.getsignal(s) != handler:
            signal.signal(s, handler)

OURS = ''.join((HERE / f).read_text(encoding='utf-8') for f in ('configurator.py', 'tokenizer.py', 'sample.py')).replace(END_OF_TEXT, '<end>')[:70_000]

def write_corpus(path='corpus.txt', documents=30):
    """A small text of several documents: our own source code."""
    size = len(OURS) // documents
    parts = [OURS[i:i + size] for i in range(0, size * documents, size)]
    Path(path).write_text(END_OF_TEXT.join(parts), encoding='utf-8', newline='')
    return path

# every character that this Python knows: the newest ones are letters to one library and nothing to another
CHARS = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ('Cn', 'Cs')]

def random_text(rng, n=200):
    """Text that is hard on tokenizers: scripts, white space, contractions, digits, emoji, controls."""
    bits = ['hello', ' world', " don't", "'LL", "'s", "'", '  ', '\n', '\n\n ', '\t', '\r\n', '123', '4567', 'é', ' déjà', '你好', 'мир',
            ' العربية', '🙂', '👩‍👩‍👧', 'e\u0301', '\u3000', '\xa0', '\x00', '\x1c', '!?', '...', ' (', '_', '<|', 'ſ', "'ſ", 'K']
    return ''.join(rng.choice(bits) if rng.random() < 0.9 else rng.choice([rng.choice(CHARS), rng.choice(CHARS[:60000])]) for _ in range(n))

def tiny(**kw):
    return GPTConfig(**{**dict(block_size=16, vocab_size=50, n_layer=2, n_head=4, n_embd=32), **kw})

SETTINGS = {
    'llama': {}, 'gqa': dict(n_kv_head=2, rope_theta=50.0), 'qwen3': dict(qk_norm=True, rope_theta=500.0), 'biased llama': dict(bias=True),
    'tied': dict(tie_weights=True), 'gpt2': GPT2, 'no norm': dict(norm='none'), 'post-norm': dict(norm_position='post'),
    'no position': dict(position='none'), 'silu': dict(mlp='silu'), 'layer norm': dict(norm='layer'),
    'naive': dict(attention='naive'), 'padded': dict(vocab_size=1100),
}

# -----------------------------------------------------------------------------
# configurator.py

def knobs_of(text, *argv):
    Path('knobs.py').write_text(text, encoding='utf-8')
    space = {'__name__': 'knobs', '__file__': 'knobs.py', '__doc__': 'Knobs.'}
    space.update({k: v for k, v in runpy.run_path('knobs.py').items() if not k.startswith('__')})
    return configure(space, argv=list(argv)), space

KNOBS = "a = 1\nlr = 0.5\nname = 'x'\non = True\ncompile = 'auto'\n_private = 3\nBIG = 4\n"

def test_later_arguments_win_and_types_are_those_of_the_defaults():
    Path('c.py').write_text('a = 5\nlr = 2\n')
    found, space = knobs_of(KNOBS, '--a=3', 'c.py', '--lr=7', '--name=p=q', '--on=False', '--compile=True')
    assert found == dict(a=5, lr=7.0, name='p=q', on=False, compile=True) and type(found['lr']) is float
    assert space['a'] == 5 and space['BIG'] == 4
    assert knobs_of(KNOBS, '--on=False', '--on')[0]['on'] is True       # a switch

def test_a_knob_leaves_a_module_of_its_name_in_another_script_alone():
    here, there = dict(__name__='a', json=False, a=1), dict(__name__='b', json=json, a=1)
    configure(here, there, argv=['--json', '--a=2'])
    assert here['json'] is True and there['json'] is json and there['a'] == 2

def test_a_config_file_sees_the_knobs_so_far_and_keeps_its_own_names():
    Path('c.py').write_text('import math\n_half = a // 2\nLIMIT = 3\na = _half + LIMIT\ndef f(): pass\n')
    assert knobs_of(KNOBS, '--a=10', 'c.py')[0]['a'] == 8

@pytest.mark.parametrize('argument, says', [
    ('--aa=1', 'did you mean a'), ('--zzz=1', '--help'), ('--a=1.5', 'whole number'), ('--on=1', 'True or False'),
    ('--lr=x', 'a number'), ('--a', '--a=value'), ('hello', 'config file'), ('missing.py', 'missing.py'),
    ('--gradient_accumulation_steps=4', 'micro_batch_size'), ('--eval_iters=3', 'eval_tokens'), ('--=', "no knob ''"),
    ('typo.py', 'did you mean name'), ('type.py', 'whole number'), ('broken.py', 'line 2'), ('raises.py', 'line 3'),
    ('list.py', 'no knob'), ('binary.py', 'binary.py'), ('exits.py', 'SystemExit'), ('--lr=inf', 'a number'),
    ('huge.py', 'a number'), ('function.py', 'a number'), ('--a=' + '9' * 20, 'below 2^63'), ('--a=' + '9' * 5000, 'below 2^63'),
    ('--name=\0', 'without NUL'), ('--name=\udcff', 'in UTF-8'), ('nul.py', 'without NUL'), ('deep.py', 'RecursionError'), ('base.py', 'GeneratorExit'),
    ('numpy.py', 'a number'), ('x\0.py', 'config file'), ('folder.py', 'folder.py'),
])
def test_what_can_not_be_read_is_one_error_that_says_what_to_do(argument, says):
    Path('typo.py').write_text('nam = "y"\n')
    Path('type.py').write_text('a = 1.5\n')
    Path('broken.py').write_text('a = 2\na = = 3\n')
    Path('raises.py').write_text('a = 2\n\na = 1 / 0\n')
    Path('list.py').write_text('betas = [0.9, 0.95]\n')
    Path('binary.py').write_bytes(b'\xff\xfe\x00')
    Path('exits.py').write_text('raise SystemExit(0)\n')
    Path('nul.py').write_text('name = "a\\0b"\n')
    Path('deep.py').write_text('def f(): f()\nf()\n')
    Path('base.py').write_text('raise GeneratorExit\n')
    Path('numpy.py').write_text('import numpy\nlr = numpy.float64(1)\n')
    Path('folder.py').mkdir()
    Path('huge.py').write_text('lr = 10 ** 400\n')
    Path('function.py').write_text('def lr(): pass\n')
    with pytest.raises(UserError, match=re.escape(says)):
        knobs_of(KNOBS, argument)

@pytest.mark.parametrize('error, says', [
    (MemoryError(), 'memory'), (lambda: torch.empty(1 << 45), 'memory'), (lambda: np.empty(1 << 55), 'memory'), (lambda: open('no\x1b/thing', 'w'), 'check the path'),
    (lambda: os.listdir('x' * 5000), 'check the path'), (OSError(28, 'No space left on device'), 'disk is full'), (UserError('x' * 10 ** 7 + ' end'), 'x ... x'),
])
def test_what_the_machine_refuses_is_one_line(error, says, capsys):
    def main():
        if isinstance(error, Exception):
            raise error
        error()
    with pytest.raises(SystemExit, match='2'):
        configurator.launch(main)
    assert says in error_line(capsys.readouterr().err)

@pytest.mark.parametrize('error', [RuntimeError('a bug'), OSError('a bug'), KeyError('a bug'), AssertionError('a bug')])
def test_a_bug_of_ours_keeps_its_traceback(error):
    def main():
        raise error
    with pytest.raises(type(error), match='a bug'):
        configurator.launch(main)

def test_no_file_of_ours_can_run_what_a_person_did_not_write():
    """The places where Python runs text or unpickles, in the syntax trees of all files."""
    found, modules = [], {'pickle', 'marshal', 'shelve', 'cPickle', 'dill', 'cloudpickle', 'joblib'}
    for path in [*HERE.glob('*.py'), *HERE.glob('config/*.py')]:
        for function in [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, (ast.Module, ast.FunctionDef, ast.Lambda))]:
            name = getattr(function, 'name', '')
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = {part for alias in node.names for part in f'{getattr(node, "module", "")}.{alias.name}'.split('.')}
                    found += [(path.name, name, bad) for bad in names & modules]
                elif isinstance(node, ast.Call):
                    call, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
                    if call in ('eval', 'exec', '__import__', 'builtins.eval', 'builtins.exec', 'os.system', 'os.popen') or call.startswith('os.exec') \
                            or given.get('shell', 'False') != 'False' or given.get('allow_pickle', 'False') != 'False' \
                            or call == 'torch.load' and given.get('weights_only') != 'True' or call.startswith('subprocess.') and path.name != 'test_all.py':
                        found.append((path.name, name, call))
    assert set(found) == {('configurator.py', '', 'exec'), ('configurator.py', 'run_file', 'exec')}     # config files are Python, as the readme says
    assert 'runs as Python' in (HERE / 'README.md').read_text(encoding='utf-8')

def test_importing_a_script_reads_no_command_line(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['x', '--max_iters=7'])
    assert script('train').max_iters != 7

def test_knobs_written_to_a_file_set_themselves_again():
    found, _ = knobs_of(KNOBS, '--a=3', "--name=it's \\ new", '--lr=1e-30')
    Path('run.py').write_text(configurator.as_file(found))
    assert knobs_of(KNOBS, 'run.py')[0] == found

@pytest.mark.parametrize('name', ['train', 'sample', 'prepare', 'bench'])
def test_help_prints_every_knob_with_its_comment(name):
    out = launch(HERE / f'{name}.py', '--help', check=0).stdout
    module = script(name)
    for knob in module.config:
        assert f'--{knob}=' in out
    assert {'train': 'sequences per optimizer step', 'sample': 'always the likeliest', 'prepare': 'tokens per .bin file',
            'bench': 'measured optimizer steps'}[name] in out

CONFIGS = sorted((HERE / 'config').glob('*.py'))

@pytest.mark.parametrize('path', [p for p in CONFIGS if not p.stem.startswith('lab_')], ids=lambda p: p.stem)
def test_every_config_file_is_read_by_train(path):
    module = script('train', path)
    module.check_knobs() if path.stem != 'finetune' else None
    module.check_batch(1)
    GPTConfig(vocab_size=100, **{k: module.config[k] for k in GPTConfig.__dataclass_fields__
                                  if k in module.config and k != 'vocab_size'})

@pytest.mark.parametrize('path', [p for p in CONFIGS if p.stem.startswith('lab_')], ids=lambda p: p.stem)
def test_every_arm_of_an_experiment_is_a_run_that_train_can_make(path):
    bench = script('bench', HERE / 'config' / 'lab.py', path)
    assert bench.what in ('compare', 'scaling') and bench.config['out_dir'] == f'out/{path.stem}'
    found = []
    for args in bench.read_arms().values():
        knobs = configurator.read_arguments(args, bench.config)[0]
        train = script('train', *(f'--{k}={v}' for k, v in knobs.items() if k in bench.train.config and k != 'dataset'))
        train.check_knobs(), train.check_batch(1)
        bench.model_config(knobs)
        found.append((knobs, [a for a in args if 'broken' in a]))
    assert len(found) >= 2 and all(a != b for a, b in itertools.combinations(found, 2))
    with pytest.raises(UserError, match='bench.py'):
        script('train', path)

# -----------------------------------------------------------------------------
# tokenizer.py

def brute_force(texts, num_merges):
    """BPE training as one would explain it, on characters' bytes, in a dozen lines."""
    findall = tokenizer_module.regex.compile(PATTERNS['gpt2']).findall
    words = Counter(tuple(bytes([b]) for b in w.encode()) for text in texts for w in findall(text))
    merges = []
    while len(merges) < num_merges:
        pairs = Counter()
        for w, n in words.items():
            for p in zip(w, w[1:]):
                pairs[p] += n
        if not pairs:
            break
        top = max(pairs.values())
        best = max(p for p in pairs if pairs[p] == top)
        words, old = Counter(), words
        for w, n in old.items():
            words[tuple(tokenizer_module.plain_merge(list(w), best))] += n
        merges.append(best)
    return merges

def tied_corpus(rng):
    letters = rng.choice(['ab', 'abc', 'aé', 'ab '])
    words = [''.join(rng.choice(letters) for _ in range(rng.randrange(1, 9))) for _ in range(rng.randrange(1, 12))]
    return ' '.join(rng.choice(words) for _ in range(rng.randrange(1, 120)))

def test_training_equals_brute_force_on_corpora_full_of_ties():
    rng = random.Random(0)
    for _ in range(200):
        text = tied_corpus(rng)
        Path('c.txt').write_text(text, encoding='utf-8', newline='')
        vocab, merges = train_bpe('c.txt', 256 + 20)
        want = brute_force([text], len(merges))
        assert merges == want == plain_train(text, len(merges))
        assert [vocab[256 + i] for i in range(len(vocab) - 256)] == list(dict.fromkeys(a + b for a, b in want))

@pytest.mark.parametrize('workers', [1, 2, 5, 8])
def test_training_gives_the_same_merges_for_any_number_of_workers(workers, monkeypatch):
    monkeypatch.setattr(configurator, 'BLOCK', 3000)
    monkeypatch.setattr(configurator, 'SMALL', 1)
    write_corpus()
    text = Path('corpus.txt').read_text(encoding='utf-8')
    vocab, merges = train_bpe('corpus.txt', 400, [END_OF_TEXT], workers=workers)
    assert merges == brute_force(text.split(END_OF_TEXT), 143)
    assert vocab[399] == END_OF_TEXT.encode() and len(vocab) == 400

def test_training_does_not_depend_on_the_order_of_files_or_the_hash_seed():
    for i, part in enumerate([OURS[:9000], OURS[9000:30000], OURS[30000:]]):
        Path(f'{i}.txt').write_text(part, encoding='utf-8', newline='')
    want = train_bpe(['0.txt', '1.txt', '2.txt'], 600)
    assert train_bpe(['2.txt', '0.txt', '1.txt'], 600) == want
    code = "from tokenizer import train_bpe; import hashlib; print(hashlib.sha256(repr(train_bpe(['1.txt', '2.txt', '0.txt'], 600)).encode()).hexdigest())"
    for seed in ('1', '2'):
        out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': str(HERE)})
        assert out.stdout.strip() == hashlib.sha256(repr(want).encode()).hexdigest(), out.stderr

def test_training_equals_brute_force_on_the_standard_library():
    files = prepare_module.standard_library()[:60 if LONG else 30]
    assert train_bpe(files, 256 + 120)[1] == brute_force([f.read_bytes().decode() for f in files], 120)

def test_counts_go_beyond_32_bits_and_one_more_decides():
    counts = {b'xy': 2 ** 40, b'zw': 2 ** 40 + 1, b'xyq': 2 ** 33}
    assert tokenizer_module.merge_words(counts, 259)[1] == [(b'x', b'y'), (b'z', b'w'), (b'xy', b'q')]
    assert tokenizer_module.merge_words({b'ab': 2 ** 52, b'cd': 2 ** 52 + 1}, 257)[1] == [(b'c', b'd')]

def test_a_small_text_is_trained_on_without_other_processes(monkeypatch):
    monkeypatch.setattr(configurator, 'ProcessPoolExecutor', None)
    Path('c.txt').write_text(OURS, encoding='utf-8')
    assert len(train_bpe('c.txt', 300, workers=4)[1]) == 44

def test_no_merge_crosses_a_special_token():
    Path('c.txt').write_text('ab<|x|>ab<|x|>ab' * 50)
    vocab, merges = train_bpe('c.txt', 300, ['<|x|>'])
    assert merges == [(b'a', b'b'), (b'ab', b'ab')]      # the last of one and the first of the next stand together
    assert all(b'<' not in a + b for a, b in merges)

def test_text_is_cut_only_where_no_token_can_cross(monkeypatch):
    rng = random.Random(1)
    specials = ['<|a|>', '<|a b|>', 'ſ', 'ſſ', END_OF_TEXT]
    toks = [Tokenizer(*train_bpe([HERE / 'tokenizer.py'], 500, specials), specials, p) for p in PATTERNS]
    for size in (1, 7, 40, 300):
        monkeypatch.setattr(configurator, 'BLOCK', size)
        for _ in range(20):
            text = ''.join(rng.choice([random_text(rng, 8), rng.choice(specials), ' plain words\nand lines ']) for _ in range(12))
            Path('t.txt').write_bytes(text.encode())
            with open('t.txt', 'rb') as f:
                pieces = list(configurator.read_blocks(f, 't.txt', specials))
            assert b''.join(pieces) == text.encode()
            for tok in toks:
                assert [i for piece in pieces for i in tok.encode(piece.decode())] == tok.encode(text)

@pytest.fixture(scope='module', params=['gpt2', 'gpt4'])
def trained(request, tmp_path_factory):
    path = tmp_path_factory.mktemp('bpe') / 'c.txt'
    path.write_text(OURS + random_text(random.Random(5), 20000), encoding='utf-8', newline='')
    specials = [END_OF_TEXT, '<|pad|>']
    return Tokenizer(*train_bpe(path, 700, specials, request.param), specials, request.param)

def as_tiktoken(tok):
    import tiktoken
    ranks = {b: i for i, b in tok.vocab.items() if i not in tok.special_ids.values()}
    return tiktoken.Encoding('ours', pat_str=PATTERNS[tok.pattern_name], mergeable_ranks=ranks, special_tokens=tok.special_ids)

def test_encoding_equals_tiktoken_and_the_plain_form(trained):
    rng, reference = random.Random(2), as_tiktoken(trained)
    for i in range(400):
        text = random_text(rng, rng.randrange(60))
        ids = trained.encode_ordinary(text)
        assert ids == reference.encode_ordinary(text), repr(text)
        assert trained.decode(ids) == text
        if i < 60:
            assert [trained.vocab[i] for i in ids] == plain_encode(text, trained.merges, trained.pattern_name)
    assert trained.encode_ordinary(OURS) == reference.encode_ordinary(OURS)

def same_in_arrays(tok, texts):
    """Are the ids of many short texts those of tiktoken, when they are encoded in one go, as a long text is?"""
    eot, reference = tok.eot, as_tiktoken(tok)
    ids = tok.encode_bytes(b'\xff'.join(text.encode() for text in texts), eot).tolist()
    return ids == [*itertools.chain.from_iterable([*reference.encode_ordinary(text), eot] for text in texts)][:-1]

@pytest.mark.parametrize('window', [1 << 17, 61])
def test_arrays_give_the_ids_of_tiktoken(trained, window, monkeypatch):
    monkeypatch.setattr(tokenizer_module, 'WINDOW', window)
    rng = random.Random(12)
    trained.forget()
    assert same_in_arrays(trained, [random_text(rng, rng.randrange(40)) for _ in range(400)])
    assert same_in_arrays(trained, [random_text(rng, rng.randrange(12)) for _ in range(1000 if window < 100 else 50_000 if LONG else 15_000)])
    monkeypatch.setattr(tokenizer_module, 'MAX_PIECES', 50)         # the table starts anew all the time
    assert same_in_arrays(trained, [random_text(rng, rng.randrange(40)) for _ in range(100)])
    assert trained.tables == []

def test_an_exception_leaves_the_ids_as_they_are(trained):
    text = random_text(random.Random(1), 300)
    for bad in (b"'\xc3a\xa9", b'\xff\xe9'):
        with pytest.raises((UnicodeDecodeError, ValueError)):
            trained.encode_bytes(bad)
        assert trained.encode_bytes(text.encode()).tolist() == as_tiktoken(trained).encode_ordinary(text)

def test_threads_share_a_tokenizer(trained):
    texts = [random_text(random.Random(i), 12).encode() for i in range(400)]
    want, wrong, before = [trained.encode_bytes(text).tolist() for text in texts], [], sys.getswitchinterval()

    def encode(seed):
        for i in random.Random(seed).choices(range(len(texts)), k=1000 if LONG else 300):
            try:
                wrong.extend([] if trained.encode_bytes(texts[i]).tolist() == want[i] else [texts[i]])
            except IndexError:
                wrong.append(texts[i])
    trained.forget()
    threads = [threading.Thread(target=encode, args=(seed,)) for seed in range(8)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong

def test_what_is_no_id_is_not_decoded(trained):
    for bad in ([10 ** 30], [None], [1.5], '72', [-1], np.array([72.0]), np.ones(5, bool), [trained.vocab_size]):
        with pytest.raises(ValueError):
            trained.decode(bad)
    assert trained.decode(torch.tensor([72, 105])) == trained.decode(np.array([72, 105], np.uint8)) == 'Hi' and trained.decode([]) == ''

def test_every_character_and_every_two_bytes_that_decode(trained):
    assert same_in_arrays(trained, [''.join(CHARS[i:i + 8]) for i in range(0, len(CHARS), 8)])
    assert same_in_arrays(trained, ['a' + c + ' b' for c in CHARS[:12000]])
    two = [bytes([a, b]).decode(errors='ignore') for a in range(256) for b in range(256)]
    assert same_in_arrays(trained, [text for text in two if len(text.encode()) == 2])

@pytest.mark.parametrize('pattern', PATTERNS)
def test_pieces_are_cut_where_the_pattern_cuts_whatever_stands_around(pattern):
    findall, one_word = tokenizer_module.regex.compile(PATTERNS[pattern]).findall, tokenizer_module.ONE_WORD[pattern]
    texts = [''.join(t) for n in (1, 2, 3, 4) for t in itertools.product("as7!' \t\n\u3000é", repeat=n)]
    raw = b'\xff'.join(text.encode() for text in texts)
    begins = tokenizer_module.cuts(raw, pattern).tolist()
    pieces = [raw[i:j] for i, j in zip(begins, [*begins[1:], len(raw)])]
    words = [findall(piece.decode()) if piece != b'\xff' else [None] for piece in pieces]
    assert [*itertools.chain.from_iterable(words)] == [*itertools.chain.from_iterable([*findall(t), None] for t in texts)][:-1]
    kinds = np.maximum.reduceat(tokenizer_module.classes(raw), begins)
    assert all(len(w) == 1 for w, kind in zip(words, kinds) if kind <= one_word)

def test_long_words_take_the_same_merges(trained):
    for word in ('a' * 300, 'ab' * 200, 'x' * 9000, ' ' * 9000, ''.join(random.Random(3).choice('etaoin') for _ in range(400)), ' ' * 333, '🙂' * 99):
        ids = trained.encode_ordinary(word)
        assert ids == as_tiktoken(trained).encode_ordinary(word)

@hypothesis.given(st.text())
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text):
    tok = ByteTokenizer()
    assert tok.decode(tok.encode_ordinary(text)) == text and tok.encode_ordinary(text) == list(text.encode())

def test_a_stream_gives_the_ids_of_the_joined_text_however_it_is_cut(trained, monkeypatch):
    rng = random.Random(4)
    for i in range(500):
        text = ''.join(rng.choice([random_text(rng, 6), END_OF_TEXT, END_OF_TEXT[:5], '<|pad|>', '  \n ', " it's "]) for _ in range(8))
        ids = trained.encode(text)
        for size in [1, 2, 5, 30, 200] * 2:
            monkeypatch.setattr(tokenizer_module, 'STREAM', size)
            cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
            assert list(trained.encode_iterable(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)]))) == ids

STREAM = """
import sys, tracemalloc
from tokenizer import load_tokenizer
tok, line = load_tokenizer('t.json'), open('line.txt', encoding='utf-8').read()
tok.encode(line)
tracemalloc.start()
if sys.argv[2] == 'stream':
    for _ in tok.encode_iterable(line for _ in range(int(sys.argv[1]))):
        pass
else:
    tok.encode(line * int(sys.argv[1]))
print(tracemalloc.get_traced_memory()[1] / 1e6)
"""

def test_a_stream_is_not_held_in_memory(trained):
    trained.save('t.json')
    Path('line.txt').write_text(OURS[:5000], encoding='utf-8')

    def megabytes(lines, how):
        done = subprocess.run([sys.executable, '-c', STREAM, str(lines), how], capture_output=True, text=True,
                              env={**os.environ, 'PYTHONPATH': str(HERE)})
        return float(done.stdout)
    short, long = megabytes(100, 'stream'), megabytes(1000, 'stream')
    assert long < short + 1 and long < 16
    assert megabytes(1000, 'all at once') > 16          # this would have been seen

def test_the_longest_special_token_wins_and_ordinary_text_never_has_one():
    specials = ['<|a|>', '<|a|><|a|>', '<|a|>b', 'b<|']
    tok = Tokenizer({i: bytes([i]) for i in range(256)}, [], specials)
    names = {v: k for k, v in tok.special_ids.items()}
    assert [names[i] for i in tok.encode('<|a|><|a|>') + tok.encode('<|a|>b')] == ['<|a|><|a|>', '<|a|>b']
    assert [names.get(i, i) for i in tok.encode('<|a|>b<|a|>')] == ['<|a|>b', '<|a|>']
    rng = random.Random(7)
    longest_first = re.compile('|'.join(map(re.escape, sorted(specials, key=len, reverse=True))))
    for _ in range(10000):
        text = ''.join(rng.choice(['<|', 'a', '|>', 'b', '<|a|>', '|']) for _ in range(12))
        found = [names[i] for i in tok.encode(text) if i in names]
        assert found == longest_first.findall(text)
        assert max(tok.encode_ordinary(text)) < 256 and tok.decode(tok.encode(text)) == text

@pytest.mark.parametrize('kind', ['gpt2', 'gpt4', 'byte', 'char', 'word'])
def test_a_saved_tokenizer_opens_here_and_in_hugging_face_with_the_same_ids(kind):
    import tokenizers
    import transformers
    if kind in PATTERNS:
        tok = Tokenizer(*train_bpe(HERE / 'tokenizer.py', 500, [END_OF_TEXT], kind), [END_OF_TEXT], kind)
    else:
        tok = {'byte': ByteTokenizer, 'char': lambda: CharTokenizer(sorted({*OURS, *'éß'})),
               'word': lambda: WordTokenizer(re.findall(r'(?s)\w+|.', OURS[:3000]))}[kind]()
    tok.save('tokenizer.json')
    again, theirs = load_tokenizer('tokenizer.json'), tokenizers.Tokenizer.from_file('tokenizer.json')
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file='tokenizer.json')
    again.save('again.json')
    assert Path('again.json').read_bytes() == Path('tokenizer.json').read_bytes()
    rng = random.Random(8)
    for text in [OURS[:3000], 'x' + END_OF_TEXT + '\n\ny', 'one two', ' a\n\n b'] + [random_text(rng, 20) for _ in range(40)]:
        ids = tok.encode(text)
        assert again.encode(text) == ids == theirs.encode(text).ids == fast(text)['input_ids']
        assert tok.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert again.vocab_size == tok.vocab_size and again.eot == tok.eot

def test_gpt2s_pair_of_files_opens_with_its_own_ids(trained):
    vocab = {tokenizer_module.printable(b): (i * 7) % 698 for i, b in trained.vocab.items() if i < 698}    # ids in any order
    merges = [' '.join(map(tokenizer_module.printable, m)) for m in trained.merges]
    Path('vocab.json').write_text(json.dumps({**vocab, END_OF_TEXT: 698}))
    Path('merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n', encoding='utf-8')
    tok = Tokenizer.from_files('vocab.json', 'merges.txt', pattern=trained.pattern_name)
    assert tok.eot == 698
    assert tok.encode_ordinary(OURS) == [(i * 7) % 698 for i in trained.encode_ordinary(OURS)]

def test_an_unknown_character_or_word_is_unk():
    tok = CharTokenizer('abc')
    assert tok.encode('abz') == [0, 1, tok.unknown] and tok.decode(tok.encode('abz')) == 'ab<unk>'
    assert tok.encode('<unk>').count(tok.unknown) == 5      # text does not name it: five characters it never saw
    word = prepare_module.make_tokenizer('word', 5, Counter(['the', 'the', 'cat', ' ', ' ', ' ', 'dog']), None)
    assert [*word.vocab.values()][:-2] == [b' ', b'the', b'cat'] and word.encode('the dog') == [1, 0, word.unknown]

def test_a_tokenizer_that_hugging_face_made_keeps_its_ids():
    import tokenizers
    level, theirs = tokenizers.pre_tokenizers.ByteLevel, tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer, theirs.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    theirs.train_from_iterator([OURS], tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=[END_OF_TEXT], show_progress=False,
                                                                      initial_alphabet=level.alphabet()))
    theirs.save('theirs.json')
    tok = Tokenizer.load('theirs.json')
    assert tok.eot == theirs.token_to_id(END_OF_TEXT) == 0
    text = OURS[:5000] + END_OF_TEXT + "déjà 你好"
    assert tok.encode(text) == theirs.encode(text).ids and tok.decode(tok.encode(text)) == text

@pytest.mark.parametrize('raw', [b'', b'x', b'\0', b'a\0b\0\0', b'\xef\xbb\xbfbom', b'a\r\nb\r\n\r\n', 'é\u2028\x85'.encode()])
def test_any_file_that_is_utf8_comes_back_byte_by_byte(raw):
    Path('f.txt').write_bytes(raw)
    tok = Tokenizer(*train_bpe('f.txt', 260))
    assert tok.decode_bytes(tok.encode(raw.decode())) == tok.decode_bytes(tok.encode_bytes(raw)) == raw

def test_a_locale_that_knows_only_ascii_changes_nothing():
    text = random_text(random.Random(11), 300)
    Path('c.txt').write_bytes(text.encode())
    code = ("from tokenizer import *; vocab, merges = train_bpe('c.txt', 300); Tokenizer(vocab, merges).save('t.json'); "
            "tok = Tokenizer.load('t.json'); ids = tok.encode(open('c.txt', 'rb').read().decode()); print(merges == tok.merges, ids)")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                          env={**os.environ, 'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0', 'PYTHONUTF8': '0', 'PYTHONPATH': str(HERE)})
    assert done.stdout.strip() == f'True {Tokenizer(*train_bpe("c.txt", 300)).encode(text)}', done.stderr

def test_two_bytes_that_are_no_character_decode_to_nothing():
    """Of the 65,536 pairs of bytes these many are no text: an ASCII byte before or after half a character, or two halves."""
    def text(a, b):
        try:
            return bytes([a, b]).decode()
        except UnicodeDecodeError:
            return None
    pairs = [text(a, b) for a in range(256) for b in range(256)]
    assert sum(p is not None for p in pairs) == 128 * 128 + 30 * 64      # two ASCII characters, or one of two bytes
    tok = ByteTokenizer()
    assert all(tok.decode(tok.encode(p)) == p for p in pairs if p is not None)

def test_bytes_are_decoded_together_since_half_a_character_is_none():
    tok = ByteTokenizer()
    ids = tok.encode('é')
    assert ''.join(tok.decode([i]) for i in ids) == '\ufffd\ufffd' and tok.decode(ids) == 'é'
    with pytest.raises(ValueError, match='ids of the vocabulary of 257'):
        tok.decode([999])

def test_text_that_is_not_utf8_is_named_with_the_place(monkeypatch):
    for at in (0, 5, 2999):
        Path('bad.txt').write_bytes(b'x' * at + b'\xff' + b'y' * 3000)
        for size in (1 << 20, 7):
            monkeypatch.setattr(configurator, 'BLOCK', size)
            with pytest.raises(UserError, match=f'bad.txt is not UTF-8: byte {at} '):
                train_bpe('bad.txt', 300)
    Path('bad.txt').write_bytes('abcdé'.encode()[:-1])
    with pytest.raises(UserError, match='byte 4 is 0xc3'):
        train_bpe('bad.txt', 300)
    with pytest.raises(UserError, match='too small'):
        train_bpe('bad.txt', 256, [END_OF_TEXT])

@pytest.mark.parametrize('kind, place, value', [
    ('bpe', ['normalizer'], {'type': 'NFC'}), ('bpe', ['truncation'], {'max_length': 2}), ('bpe', ['model', 'dropout'], 0.1),
    ('bpe', ['model', 'byte_fallback'], True), ('bpe', ['model', 'ignore_merges'], True), ('bpe', ['model', 'type'], 'Unigram'),
    ('bpe', ['model', 'continuing_subword_prefix'], '##'), ('bpe', ['post_processor'], {'type': 'TemplateProcessing', 'single': [1]}),
    ('bpe', ['pre_tokenizer', 'add_prefix_space'], True), ('bpe', ['pre_tokenizer', 'use_regex'], False),
    ('bpe', ['pre_tokenizer'], {'type': 'Whitespace'}), ('bpe', ['added_tokens', 0, 'lstrip'], True),
    ('bpe', ['added_tokens', 0, 'single_word'], True), ('bpe', ['added_tokens', 0, 'id'], 5), ('bpe', ['added_tokens', 0, 'content'], 'a'),
    ('bpe', ['added_tokens', 0], {'id': 450, 'content': '<|b|>'}), ('bpe', ['added_tokens', 1], {'id': 299, 'content': 'x<|b|>', 'normalized': True}),
    ('bpe', ['model', 'merges', -1], ['h', 'e']), ('bpe', ['model', 'merges', 0], ['zz', 'zz']), ('bpe', ['model', 'vocab', 'a'], 5),
    ('bpe', ['model', 'vocab', 'a'], 10 ** 7), ('char', ['model', 'vocab'], {'a': 0, 'b': 1, '': 2, '<unk>': 3, END_OF_TEXT: 4}),
    ('bpe', ['model', 'vocab', 'a'], 64.0), ('bpe', ['model', 'vocab', 'a'], -1), ('bpe', ['model', 'vocab', 'a'], 10 ** 12),
    ('word', ['pre_tokenizer', 'pattern', 'Regex'], r'\S+'), ('word', ['pre_tokenizer', 'behavior'], 'Contiguous'),
    ('word', ['model', 'unk_token'], 'the'), ('char', ['pre_tokenizer', 'invert'], False), ('char', ['model', 'vocab', 'a'], 77),
])
def test_a_file_that_would_give_others_other_ids_is_refused(kind, place, value):
    Path('c.txt').write_text('the hen ' * 50 + 'then he heard her here ' * 20)
    {'bpe': lambda: Tokenizer(*train_bpe('c.txt', 299, [END_OF_TEXT]), [END_OF_TEXT]), 'char': lambda: CharTokenizer('abc'),
     'word': lambda: WordTokenizer(['the', 'hen'])}[kind]().save('t.json')
    load_tokenizer('t.json')
    data = json.loads(Path('t.json').read_text())
    data['added_tokens'] += [None] if place == ['added_tokens', 1] else []
    part = functools.reduce(lambda part, key: part[key], place[:-1], data)
    part[place[-1]] = value
    Path('t.json').write_text(json.dumps(data))
    with at_most(50), pytest.raises(UserError, match='t.json is no tokenizer this project can use'):
        load_tokenizer('t.json')

@pytest.mark.parametrize('specials, merges, says', [
    ([''], [], 'empty'), (['a'], [], 'ordinary'), (['ab'], [(b'a', b'b')], 'ordinary'), (['Ġ'], [], 'ordinary'),
    ([], [(b'a', b'b'), (b'a', b'b')], 'twice'), ([], [(b'ab', b'c'), (b'a', b'b')], 'too early'), ([], [(b'a', b'q')], 'lacks'),
])
def test_a_vocabulary_that_means_two_things_is_refused(specials, merges, says):
    tokens = [bytes([b]) for b in range(256)] + [b'ab', b'abc']
    with pytest.raises(UserError, match=says):
        Tokenizer(dict(enumerate(tokens)), merges, specials)

def test_a_damaged_tokenizer_file_is_an_error_or_a_valid_tokenizer(trained):
    trained.save('t.json')
    good, rng = Path('t.json').read_text(encoding='utf-8'), random.Random(9)
    for _ in range(1000):
        i = rng.randrange(len(good))
        bad = rng.choice([good[:i], good[:i] + rng.choice('{}[]",:0aé') + good[i + 1:], good[:i] + good[i + rng.randrange(40):]])
        Path('bad.json').write_text(bad, encoding='utf-8')
        try:
            tok = load_tokenizer('bad.json')
            assert isinstance(tok.decode(tok.encode('some text')), str)
        except UserError:
            pass

@pytest.mark.parametrize('kind', ['bpe', 'gpt4', 'char', 'word'])
def test_a_hostile_tokenizer_file_is_one_error_or_a_tokenizer_and_takes_no_more_memory_than_its_size(kind):
    Path('c.txt').write_text('the hen ' * 50 + 'then he heard her here ' * 20)
    {'bpe': lambda: Tokenizer(*train_bpe('c.txt', 270, [END_OF_TEXT]), [END_OF_TEXT]), 'char': lambda: CharTokenizer('abc'),
     'gpt4': lambda: Tokenizer(*train_bpe('c.txt', 270, [END_OF_TEXT], 'gpt4'), [END_OF_TEXT], 'gpt4'), 'word': lambda: WordTokenizer(['the', 'hen'])}[kind]().save('t.json')
    good, rng, opened = json.loads(Path('t.json').read_text(encoding='utf-8')), random.Random(1), 0
    with at_most(200):
        for i in range(1500 if LONG else 100):
            data = mutated(rng, good)
            if i % 4 == 1:      # deeper than places are likely to go
                data = copy.deepcopy(good)
                data['model']['vocab'][rng.choice([*data['model']['vocab'], '', 'Ā', '\ud800', STEERING])] = rng.choice([len(good['model']['vocab']), *NASTY_JSON])
            text = json.dumps(data)
            if i % 10 == 2:
                text = text.replace(rng.choice(['null', '[', '{', '0']), rng.choice(['[' * 10 ** 5, '{"a":' * 10 ** 5, '9' * 5000, '1e400', 'NaN']), 1)
            Path('bad.json').write_text(text, encoding='utf-8')
            try:
                tok = load_tokenizer('bad.json')
            except UserError as e:
                assert 'bad.json' in str(e)
                continue
            opened += 1
            assert tok.decode(tok.encode('the hen')) and all(isinstance(tok.decode([i]), str) for i in range(tok.vocab_size))
    assert opened

# -----------------------------------------------------------------------------
# prepare.py

def prepared(*args):
    module = script('prepare', *args)
    folder = module.main()
    meta = json.loads((folder / 'meta.json').read_text())
    shards = {s: prepare_module.Shards(folder, s, meta) for s in ('train', 'val')}
    return folder, meta, {s: d.read(0, len(d)).tolist() for s, d in shards.items()}, load_tokenizer(folder / 'tokenizer.json')

def test_documents_keep_their_text_and_are_split_by_their_hash():
    texts = [f'document {i} ' + 'x' * (i % 7) + '\n' for i in range(200)]
    Path('c.txt').write_text(END_OF_TEXT.join(texts))
    folder, meta, ids, tok = prepared('--dataset=c.txt', '--vocab_size=300')
    assert folder == Path('data/c-bpe300')
    got = {s: tok.decode(ids[s]).split(END_OF_TEXT)[:-1] for s in ids}
    assert sorted(got['train'] + got['val']) == sorted(texts) and 5 <= len(got['val']) <= 40
    assert meta['train']['tokens'] == len(ids['train']) and meta['val']['documents'] == len(got['val'])
    assert meta['val']['bytes'] == sum(len(t.encode()) for t in got['val']) and meta['eot'] == tok.eot
    shutil.rmtree('data')
    Path('c.txt').write_text(END_OF_TEXT.join(texts[:100] + ['one more'] + texts[100:]))
    again = prepared('--dataset=c.txt', '--vocab_size=300')
    assert set(got['val']) <= set(again[3].decode(again[2]['val']).split(END_OF_TEXT))     # a document stays on its side

def test_a_single_text_is_split_by_position_as_nanogpt_does():
    text = OURS[:10001]
    Path('c.txt').write_text(text, encoding='utf-8', newline='')
    _, meta, ids, tok = prepared('--dataset=c.txt', '--tokenizer=char')
    n = int(len(text) * 0.9)
    assert tok.decode(ids['train']) == text[:n] and tok.decode(ids['val']).removesuffix(END_OF_TEXT) == text[n:]
    assert meta['dtype'] == '<u2' and (Path('data/c-char') / 'train_000.bin').stat().st_size == 2 * n

def test_every_form_of_the_same_documents_gives_the_same_shards(monkeypatch):
    zstd = pytest.importorskip('compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd')
    monkeypatch.setattr(configurator, 'BLOCK', 4096)
    monkeypatch.setattr(configurator, 'SMALL', 1)
    texts = [t[:1500] for t in OURS.split('\n\n') if t.strip()]         # the side of a longer one depends on its first block
    raw = END_OF_TEXT.join(texts).encode()
    lines = ''.join(json.dumps({'body': t, 'n': 1}) + '\n' for t in texts).encode()
    Path('folder').mkdir()
    for i, t in enumerate(texts):
        Path(f'folder/{i:04d}.txt').write_bytes(t.encode())
    for name, data in {'a.txt': raw, 'b.txt.gz': gzip.compress(raw), 'c.txt.xz': lzma.compress(raw),
                       'd.txt.zst': zstd.compress(raw), 'e.jsonl': lines, 'f.jsonl.gz': gzip.compress(lines)}.items():
        Path(name).write_bytes(data)
    results = []
    for name in ('a.txt', 'b.txt.gz', 'c.txt.xz', 'd.txt.zst', 'e.jsonl', 'f.jsonl.gz', 'folder'):
        _, meta, ids, tok = prepared(f'--dataset={name}', '--text_field=body', '--vocab_size=320', '--workers=2')
        results.append((ids, tok.merges, [s['sha256'] for s in meta['train']['shards']]))
    assert [[a == b for a, b in zip(r, results[0])] for r in results] == [[True] * 3] * 7
    assert sum(ids.count(tok.eot) for ids in results[0][0].values()) == len(texts)

def test_small_shards_are_read_as_one_long_array():
    write_corpus()
    _, meta, ids, tok = prepared('--dataset=corpus.txt', '--vocab_size=300')
    shutil.rmtree('data')
    folder, cut, again, _ = prepared('--dataset=corpus.txt', '--vocab_size=300', '--shard_tokens=777')
    assert again == ids and len(cut['train']['shards']) == -(-len(ids['train']) // 777)
    shards = prepare_module.Shards(folder, 'train', cut)
    for start, n in ((770, 20), (0, 1), (776, 1), (777, 1600), (len(shards) - 5, 5)):
        assert shards.read(start, n).tolist() == ids['train'][start:start + n]

def test_a_second_run_finds_the_folder_and_another_source_is_refused():
    write_corpus()
    folder = script('prepare', '--dataset=corpus.txt', '--vocab_size=300').main()
    before = (folder / 'meta.json').stat().st_mtime_ns
    assert script('prepare', '--dataset=corpus.txt', '--vocab_size=300').main() == folder
    assert (folder / 'meta.json').stat().st_mtime_ns == before
    Path('other').mkdir()
    write_corpus('other/corpus.txt', 25)
    with pytest.raises(UserError, match='was made with source'):
        script('prepare', '--dataset=other/corpus.txt', '--vocab_size=300').main()
    with pytest.raises(UserError, match='val_fraction'):
        script('prepare', '--dataset=corpus.txt', '--vocab_size=300', '--val_fraction=0.2').main()

@pytest.mark.parametrize('name, data, args, says', [
    ('e.txt', b'', (), 'no text'), ('u.txt', b'abc\xff', (), 'byte 3'), ('j.jsonl', b'{"a": 1}\n', (), 'line 1'),
    ('j.jsonl', b'nonsense\n', (), 'line 1'), ('s.jsonl', b'{"text": "\\ud800"}\n', (), 'line 1'),
    ('g.txt.gz', b'no gzip', (), 'can not read'), ('g.txt.gz', gzip.compress(os.urandom(999))[:500] + b'x' * 600, (), 'can not read'),
    ('z.txt.zst', b'no zstd', (), 'can not read'), ('t.txt', b'', ('--dataset=' + 'x' * 300,), 'no data set'), ('x.txt.xz', lzma.compress(b'a' * 999)[:-20], (), 'can not read'),
    ('p.parquet', b'no parquet', (), 'can not read|pyarrow'), ('t.txt', b'some text', ('--vocab_size=256',), 'too small'),
    ('t.txt', b'some text', ('--tokenizer=bpee',), 'no tokenizer'), ('t.txt', b'some text', ('--val_fraction=2',), 'val_fraction'),
    ('t.txt', b'a', (), 'split is empty'), ('t.txt', b'x', ('--dataset=nowhere',), 'no data set'),
])
def test_input_that_can_not_be_prepared_is_one_error_and_leaves_nothing(name, data, args, says):
    Path(name).write_bytes(data)
    with pytest.raises(UserError, match=says):
        script('prepare', f'--dataset={name}', *args).main()
    assert not list(Path('.').glob('data/[!.]*'))

def test_the_standard_library_is_one_document_per_file_without_tests_and_tables():
    files = prepare_module.standard_library()
    root = Path(os.__file__).parent
    names = [p.relative_to(root).as_posix() for p in files]
    assert {'os.py', 'json/decoder.py', 'asyncio/tasks.py'} <= set(names) and names == sorted(names)
    assert not any(re.search(r'(^|/)(test|tests|site-packages|idlelib|encodings|pydoc_data|lib2to3)/', n) for n in names)

def rows(text):
    """The lines `name | value | value` of an output as {name: [values]}"""
    parts = [[part.strip() for part in line.split(' | ')] for line in text.splitlines() if ' | ' in line]
    return {name: values for name, *values in parts}

def test_the_summary_says_what_can_be_counted_by_hand(capsys):
    texts = [f'le café {i} ' + 'déjà vu ' * (i % 7 + 1) for i in range(200)]
    Path('c.txt').write_text(END_OF_TEXT.join(texts), encoding='utf-8')
    _, meta, ids, tok = prepared('--dataset=c.txt', '--vocab_size=300')
    out = rows(capsys.readouterr().out)
    vocab = {i: b for i, b in tok.vocab.items() if i != tok.eot}
    used = len({*ids['train']} & {*vocab})
    foreign = sum(max(b) > 127 for b in vocab.values())
    assert meta['train']['used'] == used < len(vocab)
    assert out['vocabulary'] == [f'{len(vocab)} tokens and 1 special', f'{foreign / len(vocab):.1%} not ASCII',
                                 f'{used / len(vocab):.1%} used in train']
    assert out['last merges'][0].split(', ')[-1] == ' + '.join(repr(b.decode(errors='replace')) for b in tok.merges[-1])
    assert out['longest tokens'][0].startswith(repr(max(tok.vocab.values(), key=lambda b: len(b) * (b != b'<|endoftext|>')).decode()))
    # the validation split is smaller than the sample, so the table holds the numbers of the split itself
    val = [t for t in texts if t in tok.decode(ids['val']).split(END_OF_TEXT)]
    assert out['bpe'][1] == f'{meta["val"]["bytes"] / meta["val"]["tokens"]:.2f} bytes per token' == out['val'][3]
    assert out['char'][1] == f'{meta["val"]["bytes"] / (sum(map(len, val)) + len(val)):.2f} bytes per token'
    words = {w for t in texts if t not in val for w in re.findall(r'\w+|.', t)}
    n = sum(len(re.findall(r'\w+|.', t)) + 1 for t in val)
    lost = sum(len(w.encode()) for t in val for w in re.findall(r'\w+|.', t) if w not in words)
    assert 0 < lost and len(words) < 298
    assert out['word'][1:] == [f'{meta["val"]["bytes"] / n:.2f} bytes per token', f'{lost / meta["val"]["bytes"]:.2%} of the bytes unknown']

SMALL_TEXTS = {'two letters': 'ab', 'two characters': 'é\u3000', 'lines': ''.join(f'a {i}\n' for i in range(300)), 'emoji': '🙂' * 3000,
               'controls': '\x00\x1b\n' * 99, 'a long word': 'x' * 5000, 'empty documents': 'a<|endoftext|><|endoftext|>b'}

@pytest.mark.parametrize('kind', ['bpe', 'char', 'byte', 'word'])
@pytest.mark.parametrize('name', SMALL_TEXTS)
def test_the_summary_comes_whatever_the_data(kind, name, capsys):
    Path('c.txt').write_text(SMALL_TEXTS[name], encoding='utf-8', newline='')
    args = ['--dataset=c.txt', f'--tokenizer={kind}', '--vocab_size=260', '--val_fraction=0.5', '--separator=' + (r'\n' if name == 'lines' else END_OF_TEXT)]
    folder, _, _, tok = prepared(*args)
    got = capsys.readouterr().out
    got = got[got.index('train  '):]
    assert {'vocabulary', 'longest tokens', 'The Pile', 'side by side', 'char', 'word', 'byte'} <= rows(got).keys()
    assert ('bpe' in rows(got)) == ('last merges' in rows(got)) == (kind == 'bpe' and tok.merges != [])
    assert len(got.splitlines()) <= 18 and max(map(len, got.splitlines())) < 250
    assert script('prepare', *args, f'--compare={folder}/tokenizer.json').main() == folder

def test_two_tokenizers_are_compared_on_the_text_of_both(capsys):
    Path('a.txt').write_text(END_OF_TEXT.join(f'the cat number {i} sat on the mat. ' * 5 for i in range(100)))
    Path('b.txt').write_text(END_OF_TEXT.join(f'Straße {i} führt über den Fluß nach Köln. ' * 5 for i in range(100)), encoding='utf-8')
    folder, meta, ids, tok = prepared('--dataset=a.txt', '--vocab_size=300')
    other, other_meta, other_ids, other_tok = prepared('--dataset=b.txt', '--vocab_size=320')
    capsys.readouterr()
    script('prepare', '--dataset=a.txt', '--vocab_size=300', f'--compare={other}/tokenizer.json').main()
    text = capsys.readouterr().out
    out = rows(text)
    assert [*out] == ['compared', 'our val', 'their val']       # the folder was there: nothing else is said

    def rate(meta, ids, tok, by):
        return meta['val']['bytes'] / len(by.encode(tok.decode(ids['val'])))
    ours, theirs = rate(meta, ids, tok, tok), rate(meta, ids, tok, other_tok)
    assert theirs < ours and out['our val'] == [f'{ours:.2f} bytes per token with ours', f'{theirs:.2f} with theirs',
                                                f'theirs loses {1 - theirs / ours:.1%}']
    ours, theirs = rate(other_meta, other_ids, other_tok, tok), rate(other_meta, other_ids, other_tok, other_tok)
    assert ours < theirs and out['their val'] == [f'{theirs:.2f} bytes per token with theirs', f'{ours:.2f} with ours',
                                                  f'ours loses {1 - ours / theirs:.1%}']
    shutil.rmtree(folder)                                       # a new folder prints the same comparison
    script('prepare', '--dataset=a.txt', '--vocab_size=300', f'--compare={other}/tokenizer.json').main()
    assert {k: v for k, v in rows(capsys.readouterr().out).items() if k in out} == out
    shutil.copy(other / 'tokenizer.json', 'alone.json')         # without its text there is one direction
    script('prepare', '--dataset=a.txt', '--vocab_size=300', '--compare=alone.json').main()
    assert [*rows(capsys.readouterr().out)] == ['compared', 'our val']

@pytest.mark.parametrize('name, text', [('nowhere.json', None), ('data', None), ('empty.json', ''), ('other.json', '{"a": 1}'),
                                        ('list.json', '[]'), ('binary.json', '\udcff\x00')])
def test_a_tokenizer_that_can_not_be_compared_is_refused_before_any_work(name, text):
    write_corpus()
    Path('data').mkdir()
    if text is not None:
        Path(name).write_bytes(text.encode(errors='surrogateescape'))
    assert name in one_line(launch(HERE / 'prepare.py', '--dataset=corpus.txt', '--vocab_size=300', f'--compare={name}'))
    assert not [*Path('data').iterdir()]

def test_shards_that_are_not_of_the_tokenizer_beside_them_are_refused():
    write_corpus()
    folder, *_ = prepared('--dataset=corpus.txt', '--vocab_size=400')
    ByteTokenizer().save(folder / 'tokenizer.json')
    for damage in ({}, {'val': {}}, {'val': []}, {'dtype': 'x'}):
        meta = json.loads((folder / 'meta.json').read_text())
        (folder / 'meta.json').write_text(json.dumps({**meta, **damage}))
        with pytest.raises(UserError, match='val shards|meta.json'):
            script('prepare', '--dataset=corpus.txt', '--vocab_size=300', f'--compare={folder}/tokenizer.json').main()
        (folder / 'meta.json').write_text(json.dumps(meta))
    assert not Path('data/corpus-bpe300').exists()

def test_the_sample_of_a_split_is_its_beginning(monkeypatch):
    monkeypatch.setattr(prepare_module, 'SAMPLE', 100)
    monkeypatch.setattr(prepare_module, 'BLOCK', 60)
    items = [('val' if i % 3 == 0 else 'train', 'é'.encode() * 10, i % 2 == 0) for i in range(40)]
    sample = {'train': [], 'val': []}
    assert [x for batch in prepare_module.keep_sample(prepare_module.in_batches(items), sample) for x in batch] == items
    for split, got in sample.items():
        assert got == [x for x in items if x[0] == split][:len(got)] and 100 <= sum(len(x[1]) for x in got) < 160
    short = prepare_module.beginning(sample['val'], 51)
    assert short == sample['val'][:2] + [('val', 'é'.encode() * 5, sample['val'][2][2])]

def test_ids_that_do_not_fit_raise_and_large_vocabularies_take_four_bytes():
    for n, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        chars = CharTokenizer(map(chr, range(1 << 16, (1 << 16) + n - 2)))
        assert chars.vocab_size == n and chars.dtype == dtype and chars.encode_bytes(b'\xff', chars.eot).tolist() == [n - 1]
    tok = Tokenizer({**{i: bytes([i]) for i in range(256)}, 70000: b'ab'}, [(b'a', b'b')], [END_OF_TEXT])
    assert prepare_module.encode_batch(tok)([('train', b'xab', True)])['train'][0].tolist() == [120, 70000, tok.eot]

def test_an_id_that_does_not_fit_its_shard_raises():
    for dtype, fits, not_ in (('<u2', 65535, 65536), ('<u2', 65535, 70000), ('<u2', 0, -1), ('<u4', 1 << 16, 1 << 32)):
        writer = prepare_module.ShardWriter(Path('.'), 'train', dtype, 100)
        writer.write(np.array([fits]))
        with pytest.raises(ValueError, match='does not fit'):
            writer.write(np.array([fits, not_, fits]))
        writer.close()
        assert np.fromfile('train_000.bin', dtype).tolist() == [fits]

@pytest.mark.parametrize('vocab_size, dtype', [(1 << 16, '<u2'), ((1 << 16) + 1, '<u4')])
def test_shards_take_four_bytes_where_two_do_not_hold_the_vocabulary(vocab_size, dtype):
    Path('c.txt').write_text(''.join(map(chr, range(1 << 16, (1 << 16) + vocab_size - 2))), encoding='utf-8')
    folder, meta, ids, tok = prepared('--dataset=c.txt', '--tokenizer=char')
    assert (meta['vocab_size'], meta['dtype']) == (vocab_size, dtype)
    assert ids['train'] + ids['val'] == [*range(vocab_size - 2), tok.eot] and tok.eot == vocab_size - 1
    prepare_module.check_data(folder, prepare_module.read_meta(folder))

# -- what train.py is about to read

def checked(folder):
    return prepare_module.check_data(folder, prepare_module.read_meta(folder))

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A data folder of several shards."""
    path = tmp_path_factory.mktemp('whole')
    with pytest.MonkeyPatch.context() as m:
        m.chdir(path)
        write_corpus()
        return path / prepared('--dataset=corpus.txt', '--vocab_size=400', '--shard_tokens=9000')[0]

@pytest.fixture
def copied(whole):
    """-> (a copy of that folder, its meta.json, a function that writes it)"""
    shutil.copytree(whole, 'copy')
    meta = json.loads(Path('copy/meta.json').read_text())
    return Path('copy'), meta, lambda: Path('copy/meta.json').write_text(json.dumps(meta))

@pytest.mark.parametrize('says, damage', [
    (r'[\d,]+ bytes, not 9,000 tokens', lambda f, b: f.write_bytes(b[:-2])), ('17,999 bytes', lambda f, b: f.write_bytes(b[:-1])),
    (' 0 bytes', lambda f, b: f.write_bytes(b'')), ('18,002 bytes', lambda f, b: f.write_bytes(b + b'\0\0')), ('No such file', lambda f, b: f.unlink()),
    ('sha256 of train_001.bin', lambda f, b: f.write_bytes((f.parent / 'train_000.bin').read_bytes())),     # another shard
    ('sha256 of train_001.bin', lambda f, b: f.write_bytes(np.random.default_rng(0).integers(0, 257, 9000).astype('<u2').tobytes())),  # other ids
    ('train_001.bin', lambda f, b: (f.unlink(), f.mkdir())),
])
def test_a_shard_that_is_not_the_one_of_meta_json_is_refused(copied, says, damage):
    folder, *_ = copied
    checked(folder)
    file = folder / 'train_001.bin'
    damage(file, file.read_bytes())
    with pytest.raises(UserError, match=f'(?i){says}'):
        checked(folder)

def test_a_bit_that_was_turned_anywhere_is_found(copied):
    folder, meta, _ = copied
    rng = random.Random(0)
    for _ in range(1000 if LONG else 20):
        file = folder / rng.choice(meta['train']['shards'] + meta['val']['shards'])['name']
        raw = file.read_bytes()
        edited = bytearray(raw)
        edited[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(edited)
        with pytest.raises(UserError, match=f'sha256 of {file.name}|of {file.name} is'):
            checked(folder)
        file.write_bytes(raw)
    checked(folder)

@pytest.mark.parametrize('place', [0, -1, None])
@pytest.mark.parametrize('id', [400, 65535])
def test_an_id_outside_the_vocabulary_is_refused_by_its_place_even_if_the_sha256_is_right(copied, place, id):
    folder, meta, write = copied
    ids = np.fromfile(folder / 'train_002.bin', '<u2')
    place = random.Random(1).randrange(len(ids)) if place is None else range(len(ids))[place]
    ids[place] = id
    ids.tofile(folder / 'train_002.bin')
    meta['train']['shards'][2]['sha256'] = configurator.file_sha256(folder / 'train_002.bin')
    write()
    with pytest.raises(UserError, match=f'token {place:,} of train_002.bin is {id:,}, and the vocabulary has 400'):
        checked(folder)

HUGE = 1 << 62
@pytest.mark.parametrize('where, values', [
    ('dtype', ['<u4', '>u2', '<u8', 'u2', '|O', '', 2, None, [], {}]), ('vocab_size', [HUGE, 1 << 24, 401, 399, 0, -1, 400.0, '400', True, None, [], 10 ** 400]),
    ('eot', [400, -1, 3.0, 'x', None, HUGE]), ('train', [None, 5, [], {}, 'x', {'shards': []}, {'shards': {}}, {'shards': [5]}, {'shards': 'abc'}, {'shards': [{}]}]),
    ('val', [None, [], {'shards': None}]), ('train.tokens', [HUGE, -1, 'x', None, 1.5]), ('val.bytes', [0, -1, 'x', None, HUGE * 2, 1.5]),
    ('val.unknown_bytes', [-1, 'x', None, []]), ('val.tokens', [0, HUGE, 'x']), ('val.gzip_bpb', ['x', None, [], 10 ** 400]), ('val.xz_bpb', [{}]),
    ('train.shards.0.tokens', [HUGE, 0, -1, 'x', None, 4500, 8999, 9001]), ('val.shards.0.tokens', [HUGE]),
    ('train.shards.0.name', ['../copy/train_000.bin', '/etc/passwd', 'a/train_000.bin', '..', '.', '', 'C:x', 'a\\b', 'x\0', 5, None, ['x'], 'train_000.bin\n']),
    ('train.shards.0.sha256', ['0' * 64, '', 5, None, []]), ('tokenizer_sha256', ['0' * 64, 5, None]), ('train.shards.1', [None, 7]),
])
def test_a_meta_json_that_lies_is_one_line(copied, where, values):
    folder, meta, write = copied
    *path, key = [int(k) if k.isdigit() else k for k in where.split('.')]
    inner = functools.reduce(lambda x, k: x[k], path, meta)
    for value in values:
        inner[key] = value
        write()
        with pytest.raises(UserError, match='meta.json|can not train on'):
            checked(folder)
    del inner[key]
    write()
    if where in ('dtype', 'vocab_size', 'eot', 'train', 'val', 'val.unknown_bytes', 'val.gzip_bpb', 'train.shards.0.name'):
        with pytest.raises(UserError, match='meta.json'):
            checked(folder)

def test_a_vocabulary_is_not_larger_than_the_files_that_ask_for_it(copied):
    folder, meta, write = copied
    (folder / 'tokenizer.json').unlink()
    del meta['tokenizer_sha256']
    for split in ('train', 'val'):
        for s in meta[split]['shards']:
            np.fromfile(folder / s['name'], '<u2').astype('<u4').tofile(folder / s['name'])
            s['sha256'] = configurator.file_sha256(folder / s['name'])
    meta.update(dtype='<u4', vocab_size=1 << 16)
    write()
    checked(folder)
    meta['vocab_size'] = 1 << 24
    write()
    with pytest.raises(UserError, match='not that of its tokenizer'):
        checked(folder)
    for dtype, vocab_size in (('<u2', (1 << 16) + 1), ('<u4', HUGE)):
        meta.update(dtype=dtype, vocab_size=vocab_size)
        write()
        with pytest.raises(UserError, match=f'vocab_size is {vocab_size}'):
            prepare_module.read_meta(folder)        # all that bench.py asks for

def test_a_tokenizer_that_did_not_make_the_shards_is_refused(copied):
    folder, meta, write = copied
    text = (folder / 'tokenizer.json').read_text(encoding='utf-8')
    (folder / 'tokenizer.json').write_text(text + ' ', encoding='utf-8')
    with pytest.raises(UserError, match='tokenizer.json is not the one'):
        checked(folder)
    ByteTokenizer().save(folder / 'tokenizer.json')
    meta['tokenizer_sha256'] = configurator.file_sha256(folder / 'tokenizer.json')
    write()
    with pytest.raises(UserError, match='400 is not that of its tokenizer'):
        checked(folder)
    (folder / 'tokenizer.json').unlink()
    with pytest.raises(UserError, match='tokenizer.json'):
        checked(folder)

def test_a_check_is_remembered_while_the_files_stay_as_they_are_and_for_nothing_else(copied, monkeypatch):
    folder, meta, write = copied
    read, counted = prepare_module.read_shard, []
    monkeypatch.setattr(prepare_module, 'read_shard', lambda path, *args: (counted.append(path.name), read(path, *args))[1])

    def reads():
        counted.clear()
        checked(folder)
        return len(counted)
    n = len(meta['train']['shards']) + len(meta['val']['shards'])
    assert reads() == reads() == n      # written a moment ago: a clock might not show another change
    clock = time.time_ns
    monkeypatch.setattr(time, 'time_ns', lambda: clock() + 10 ** 10)
    assert reads() == n and reads() == reads() == 0
    file = folder / 'train_001.bin'
    raw = file.read_bytes()
    file.write_bytes(raw)
    assert reads() == 1 and reads() == 0
    old = file.stat()
    time.sleep(0.02)
    file.write_bytes(raw[::-1])         # of the same length, with the old time
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(UserError, match='train_001.bin'):
        checked(folder)
    file.write_bytes(raw)
    assert reads() <= n and reads() == 0
    os.utime(file)
    (folder / 'new').write_bytes(raw)
    os.replace(folder / 'new', file)    # another file
    assert reads() == 1 and reads() == 0
    remembered = json.loads((folder / 'checked.json').read_text())
    for nonsense in ('', '[]', '{', 'null', '{"a": 1}', *(json.dumps(dict.fromkeys(remembered, v)) for v in (None, 5, [], {}, 'x', '0' * 64))):
        (folder / 'checked.json').write_text(nonsense)
        assert reads() == n and reads() == 0
    meta['vocab_size'] = 399            # what was found is not an answer to another question
    write()
    (folder / 'tokenizer.json').unlink()
    del meta['tokenizer_sha256']
    meta['eot'] = 0
    write()
    with pytest.raises(UserError, match='is 399, and the vocabulary has 399'):
        checked(folder)

def test_a_folder_that_can_not_be_written_to_is_checked_every_time(copied, monkeypatch):
    folder, *_ = copied
    def refuse(path, text):
        raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(prepare_module, 'write_whole', refuse)
    clock = time.time_ns
    monkeypatch.setattr(time, 'time_ns', lambda: clock() + 10 ** 10)
    checked(folder)
    assert not (folder / 'checked.json').exists()

def test_a_shard_that_changes_while_it_is_checked_is_refused(copied, monkeypatch):
    folder, *_ = copied
    read = prepare_module.read_shard
    def grow(path, *args):
        found = read(path, *args)
        os.utime(path, ns=(1, 1))
        return found
    monkeypatch.setattr(prepare_module, 'read_shard', grow)
    with pytest.raises(UserError, match='changed while it was checked'):
        checked(folder)

def test_nanogpts_pair_is_checked_too_and_told_from_another(monkeypatch):
    Path('nano').mkdir()
    def hash_of(train, val):
        Path('nano/train.bin').write_bytes(np.array(train, '<u2').tobytes())
        Path('nano/val.bin').write_bytes(np.array(val, '<u2').tobytes() if isinstance(val, list) else val)
        return prepare_module.data_hash(checked(Path('nano')))
    first = hash_of([1, 2, 50256], [3, 4])
    assert first == hash_of([1, 2, 50256], [3, 4]) and len({first, hash_of([1, 2, 5], [3, 4]), hash_of([1, 2, 50256], [3, 5])}) == 3
    monkeypatch.setenv('LOCAL_RANK', '1')       # which each process has to know
    assert hash_of([1, 2, 50256], [3, 4]) == first
    for val, says in (([], '0 bytes'), (b'abc', '3 bytes'), ([1, 50257], 'token 1 of val.bin is 50,257'),
                      ([5] * 1_200_000 + [60000], 'token 1,200,000 of')):
        with pytest.raises(UserError, match=says):
            hash_of([1, 2, 3], val)

def test_of_several_processes_the_first_on_a_machine_checks(copied, monkeypatch):
    folder, *_ = copied
    (folder / 'train_000.bin').write_bytes(b'xx')
    monkeypatch.setenv('LOCAL_RANK', '1')
    checked(folder)
    monkeypatch.setenv('LOCAL_RANK', '0')
    with pytest.raises(UserError):
        checked(folder)

def test_training_does_not_begin_on_damaged_data(copied):
    folder, *_ = copied
    with open(folder / 'train_002.bin', 'r+b') as f:
        f.write(b'\xff\xff')
    with pytest.raises(UserError, match='token 0 of train_002.bin'):
        train_here(f'--dataset={folder}', '--max_iters=2', '--out_dir=a')
    assert [p.name for p in Path('a').iterdir()] == ['.lock']

def test_a_shard_cut_short_under_a_reader_is_an_error_and_no_signal(copied):
    folder, meta, _ = copied
    shards = prepare_module.Shards(folder, 'train', meta)
    expected = shards.read(8000, 9000).tolist()
    os.truncate(folder / 'train_001.bin', 12000)
    assert shards.read(8000, 7000).tolist() == expected[:7000]
    with pytest.raises(UserError, match='train_001.bin has become shorter'):
        shards.read(8000, 7001)

# -- prepare.py that is killed, has no room, is not alone, or reads what changes

CHILDREN = """
import os, resource, signal, sys, time, traceback
from pathlib import Path
import configurator, prepare
def child(work):
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        configurator.launch(work)
        status = 0
    except SystemExit as e:
        status = e.code
    except BaseException:
        traceback.print_exc()
    os._exit(status)
def result(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def make(limit=None):
    sys.stdout = open(os.devnull, 'w')
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    prepare.prepare('corpus.txt', 'bpe', 400)
folder = Path('data/corpus-bpe400')
"""
forks = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')

def left():
    """What a failed run left in data/, but for locks."""
    return [p.name for p in Path('data').glob('*') if p.suffix != '.lock']

@forks
def test_prepare_that_was_killed_gives_the_same_shards_when_run_again():
    write_corpus()
    launch('-c', CHILDREN + """
import random, shutil
random.seed(0)
def contents():
    return {p.name: p.read_bytes() for p in folder.iterdir()}
def kill_at(n):     # at the nth time that something is put on the disk or gets its name
    def counted(function):
        def call(*args):
            if not (calls := calls_left.pop() if calls_left else 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)
        return call
    calls_left = [0] + [1] * n
    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    make()
t = time.perf_counter()
assert result(child(make)) == 0
took, whole = time.perf_counter() - t, contents()
killed = tries = 0
while killed < int(sys.argv[1]):
    shutil.rmtree(folder)
    if tries % 2:
        pid = child(lambda: kill_at(tries // 2 % 9))
    else:
        pid = child(make)
        time.sleep(took * random.random())
        os.kill(pid, signal.SIGKILL)
    killed, tries = killed + (result(pid) == -signal.SIGKILL), tries + 1
    assert not folder.exists() or contents() == whole
    assert result(child(make)) == 0 and contents() == whole
    assert [p.name for p in Path('data').iterdir() if p.suffix != '.lock'] == [folder.name]
""", 40 if LONG else 4, PYTHONPATH=str(HERE), check=0)

@forks
def test_prepare_on_a_full_disk_is_one_line_and_leaves_nothing():
    write_corpus()
    sizes = [0, 1, 1000, 4096, 20_000, 50_000]
    done = launch('-c', CHILDREN + f"print([result(child(lambda: make(n))) for n in {sizes}])", PYTHONPATH=str(HERE), check=0)
    assert done.stdout == f'{[2] * len(sizes)}\n' and left() == []
    lines = done.stderr.splitlines()
    assert len(lines) == len(sizes) and all(line.startswith('error: the disk is full') for line in lines), done.stderr

@forks
def test_a_second_prepare_of_a_folder_is_refused_until_the_first_ends_in_whatever_way():
    write_corpus()
    done = launch('-c', CHILDREN + """
import shutil
def start(*work):
    pid = child(lambda: ([w() for w in work], Path('busy').touch(), time.sleep(60)))
    while not Path('busy').exists():
        time.sleep(0.01)
    os.remove('busy')
    return pid
make_folder, prepare.make_folder = prepare.make_folder, lambda *args: (Path('busy').touch(), time.sleep(60))
first = start(make)
prepare.make_folder = make_folder
print(result(child(make)), folder.exists())
os.kill(first, signal.SIGKILL)
print(result(first), result(child(make)), folder.exists())
shutil.rmtree(folder)
alive = start(make)         # as train.py does, which goes on for a week
shutil.rmtree(folder)
print(result(child(make)), folder.exists())
os.kill(alive, signal.SIGKILL)
""", PYTHONPATH=str(HERE), check=0)
    assert done.stdout == '2 False\n-9 0 True\n0 True\n'
    assert done.stderr == f'error: another process is preparing data{os.sep}corpus-bpe400: wait for it, or stop it\n'

@pytest.mark.parametrize('change, says', [
    (lambda f: f.write_text(f.read_text() + 'more'), 'changed while it was read'), (lambda f: f.unlink(), 'can not read'),
    (lambda f: f.write_text(f.read_text()[:-1]), 'changed while it was read'), (lambda f: os.utime(f, ns=(1, 1)), 'changed while it was read'),
    (lambda f: (f.unlink(), f.symlink_to('/proc/self/mem')), 'can not read|changed'),      # a file that can not be read
])
@pytest.mark.parametrize('when', ['survey', 'make_tokenizer', 'at the end'])
def test_a_file_that_changes_while_it_is_read_is_one_line_and_leaves_nothing(when, change, says):
    Path('texts').mkdir()
    for i in range(25):
        Path(f'texts/{i:02d}.txt').write_text(f'text number {i} ' * 20)
    module = script('prepare', '--dataset=texts', '--tokenizer=byte')
    step, encode, file = getattr(module, when, None), module.parallel_map, Path('texts/11.txt')
    if step:        # before a pass
        setattr(module, when, lambda *args: (change(file), step(*args))[1])
    else:
        module.parallel_map = lambda *args: itertools.chain(encode(*args), (x for x in [file] if change(x) is x))
    with pytest.raises(UserError, match=says):
        module.main()
    assert left() == []

def test_a_folder_has_its_name_only_when_it_is_on_the_disk(monkeypatch):
    write_corpus()
    events, replace = [], os.replace
    module = script('prepare', '--dataset=corpus.txt', '--vocab_size=300', '--shard_tokens=20000')
    monkeypatch.setattr(configurator, 'sync', lambda path: events.append(Path(path).name))
    module.sync = configurator.sync
    monkeypatch.setattr(os, 'replace', lambda a, b: (events.append((Path(a).name, Path(b).name)), replace(a, b)))
    folder = module.main()
    at = events.index(('.corpus-bpe300.partial', 'corpus-bpe300'))
    assert events[at + 1:] == ['data'] and {p.name for p in folder.glob('*.*')} - {'meta.json'} <= {*events[:at]}
    assert ['.meta.json.partial', ('.meta.json.partial', 'meta.json'), '.corpus-bpe300.partial'] == events[at - 3:at]

def test_a_word_the_vocabulary_lacks_is_counted_in_bytes():
    Path('c.txt').write_text('aa bb ' * 900 + 'zzz é ' * 100)
    _, meta, ids, tok = prepared('--dataset=c.txt', '--tokenizer=word', '--vocab_size=5', '--val_fraction=0.1')
    assert [*tok.vocab.values()][:-2] == [b' ', b'aa', b'bb'] and meta['val']['unknown_bytes'] == 100 * 5      # zzz and é
    bpb = prepare_module.bits_per_byte(1.5, meta)
    assert bpb == pytest.approx((1.5 / math.log(2) * len(ids['val']) + 8 * 500) / meta['val']['bytes'])

class Server(http.server.BaseHTTPRequestHandler):
    data, log, faults, tags = b'', [], [], {}

    def do_GET(self):
        start = int((self.headers.get('Range') or 'bytes=0-')[6:-1])
        self.log.append(start)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return self.send_error(fault)
        if fault == 'stall':
            return time.sleep(1)
        if not (self.headers.get('If-Range') in self.tags.values() or fault == 'blind'):
            start = 0
        body = os.urandom(100_000) if fault == 'wrong' else b'' if fault == 'empty' else self.data[start:]
        self.send_response(302 if fault == 'loop' else 206 if start else 200)
        self.send_header('Location', '/file.bin')
        self.send_header('Content-Length', str(len(body)))
        for name, value in self.tags.items():
            self.send_header(name, value)
        if start:
            self.send_header('Content-Range', {'elsewhere': 'bytes 0-99999/100000', 'silent': 'nonsense', 'small': 'bytes 50000-59999/60000'}.get(
                fault, f'bytes {start}-{len(self.data) - 1}/{len(self.data)}'))
        self.end_headers()
        self.wfile.write(body[:len(body) // 2] if fault == 'short' else body + b'more' * (fault == 'long'))

    def log_message(self, *args):
        pass

@pytest.fixture
def server():
    Server.data, Server.log, Server.faults, Server.tags = os.urandom(100_000), [], [], {'ETag': '"1"'}
    httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server)
    threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
    yield f'http://127.0.0.1:{httpd.server_port}/file.bin'
    httpd.shutdown()
    httpd.server_close()

@pytest.mark.parametrize('tags, again', [({'ETag': '"1"'}, 50_000), ({'Last-Modified': 'Sun, 01 Nov 2026 00:00:00 GMT'}, 50_000),
                                         ({}, 0), ({'ETag': 'W/"1"'}, 0)])
def test_a_download_goes_on_where_it_stopped_if_the_server_can_say_that_the_file_is_the_same(server, tags, again):
    Server.faults, Server.tags = ['short', 500], tags
    path = prepare_module.download(server, 'down/file.bin')
    assert path.read_bytes() == Server.data and Server.log == [0, again, again]
    assert [p.name for p in Path('down').glob('[!.]*')] == ['file.bin']
    prepare_module.download(server, 'down/file.bin')
    assert len(Server.log) == 3         # what is there is not fetched again

@pytest.mark.parametrize('fault', [None, 'blind'])
def test_a_file_that_changed_on_the_server_is_fetched_from_its_beginning(server, fault):
    Server.faults = ['short', 404]
    with pytest.raises(UserError, match='404'):
        prepare_module.download(server, 'down/file.bin')
    Server.data, Server.tags, Server.faults = os.urandom(100_000), {'ETag': '"2"'}, [fault]
    assert prepare_module.download(server, 'down/file.bin').read_bytes() == Server.data
    assert Server.log == [0, 50_000, 50_000] + [0] * (fault == 'blind')     # one that says so, one that goes on regardless

@pytest.mark.parametrize('faults, sha, says', [
    ([404], None, '404'), ([500] * 3, None, '500'), ([500, 'wrong'], '0' * 64, 'sha256'), (['wrong'] * 3, '0' * 64, 'sha256'),
    (['short'] * 3, None, 'of 100,000 bytes'), (['loop'] * 99, None, 'infinite loop'), (['stall'] * 3, None, 'timed out'),
    (['short', 'elsewhere', 'short'], None, 'of 100,000 bytes'), (['short', 'silent', 404], None, '404'), (['empty'] * 3, None, r'\(0 of 0'),
    (['short', 416, 'short'], None, r'\(50,000 of'), (['short', 'small', 'short'], None, r'\(50,000 of'), ([204] * 3, None, 'status 204'),
])
def test_a_download_that_fails_leaves_no_file_and_says_where_to_put_it(server, faults, sha, says):
    Server.faults = [*faults]
    with pytest.raises(UserError, match=says) as e:
        prepare_module.download(server, 'down/file.bin', sha, timeout=0.2)
    assert 'down/file.bin by hand' in str(e.value).replace(os.sep, '/') and server in str(e.value)
    assert not Path('down/file.bin').exists() and len(Server.log) <= (11 if 'loop' in faults else 3)

def test_what_a_server_sends_beyond_the_length_it_gave_is_not_taken(server, monkeypatch):
    Server.faults, events = ['long'], []
    monkeypatch.setattr(configurator, 'sync', lambda path: events.append(Path(path).name))
    assert prepare_module.download(server, 'down/file.bin').read_bytes() == Server.data
    assert events == ['file.bin.part', 'down']      # it is on the disk before it has its name

def test_bytes_of_another_sha256_are_fetched_again_from_the_beginning(server):
    Server.faults = ['wrong', 'short']
    assert prepare_module.download(server, 'down/file.bin', hashlib.sha256(Server.data).hexdigest()).read_bytes() == Server.data
    assert Server.log == [0, 0, 50_000]

def test_two_processes_do_not_write_one_download(server, monkeypatch):
    code = "import configurator, time; configurator.lock('down/.file.bin.lock', ''); print('locked', flush=True); time.sleep(60)"
    Path('down').mkdir()
    other = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=str(HERE)))
    assert other.stdout.readline().strip() == b'locked'
    with pytest.raises(UserError, match='another process is fetching'):
        prepare_module.download(server, 'down/file.bin')
    monkeypatch.setenv('WORLD_SIZE', '2')       # the processes of one run wait for each other
    threading.Timer(0.3, other.kill).start()
    assert prepare_module.download(server, 'down/file.bin').read_bytes() == Server.data and other.wait() == -signal.SIGKILL
    Path('file').touch()
    with pytest.raises(UserError, match='can not write to file'):
        prepare_module.download(server, 'file/file.bin')

def test_files_placed_by_hand_need_no_network(monkeypatch):
    Path('data/downloads').mkdir(parents=True)
    for split in ('train', 'valid'):
        Path(f'data/downloads/TinyStoriesV2-GPT4-{split}.txt').write_text(f'A {split} story.\n{END_OF_TEXT}\n' * 50)
    _, meta, ids, tok = prepared('--dataset=tinystories', '--vocab_size=280')
    assert 'train' in tok.decode(ids['train']) and 'train' not in tok.decode(ids['val']) and meta['val']['documents'] == 50

# -----------------------------------------------------------------------------
# model.py

def close(a, b, tol):
    assert torch.allclose(a, b, rtol=tol, atol=tol), float((a - b).abs().max())

def test_the_functions_equal_those_of_torch():
    m = model_module
    x, y = 5 * torch.randn(4, 7, 30, dtype=torch.float64), torch.randint(0, 30, (4, 7))
    close(m.softmax(x, -1), F.softmax(x, -1), 1e-12)
    close(m.softmax(x + 1e4, 1), F.softmax(x + 1e4, 1), 1e-9)
    close(m.silu(x), F.silu(x), 1e-12)
    close(m.gelu(x), F.gelu(x, approximate='tanh'), 1e-12)
    close(m.cross_entropy(x, y), F.cross_entropy(x.view(-1, 30), y.view(-1)), 1e-12)
    assert torch.isfinite(m.cross_entropy(1000 * x.float(), y))
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    close(m.scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask), 1e-6)
    close(m.RMSNorm(30, 1e-5)(x.float()), F.rms_norm(x.float(), (30,), eps=1e-5), 1e-6)
    close(m.LayerNorm(30, 1e-5, True)(x.float()), F.layer_norm(x.float(), (30,)), 1e-5)

class Value:
    """
    A number that remembers what it was made of, each part with the slope: the derivative of the number by that part.
    backward() multiplies slopes along every way from a result to what it was made of, and adds up over the ways:

        x = Value(3.0)
        y = x * x + x
        y.backward()        # x.grad is 7.0: 3.0 + 3.0 by the two sides of the product, and 1.0
    """
    ages = itertools.count()

    def __init__(self, data, *parts):
        self.data, self.parts, self.grad, self.age = data, parts, 0.0, next(Value.ages)

    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, (self, 1.0), (other, 1.0))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, (self, other.data), (other, self.data))

    def __pow__(self, n):       # n is a plain number
        return Value(self.data ** n, (self, n * self.data ** (n - 1)))

    def exp(self):
        return Value(math.exp(self.data), (self, math.exp(self.data)))

    def log(self):
        return Value(math.log(self.data), (self, 1 / self.data))

    def __sub__(self, other):
        return self + other * -1

    def __truediv__(self, other):
        return self * other ** -1

    __radd__, __rmul__ = __add__, __mul__

    def backward(self):
        """Sets grad, the derivative of this number, in everything it was made of."""
        found, todo = {self}, [self]
        while todo:
            new = {part for part, _ in todo.pop().parts} - found
            found |= new
            todo += new
        self.grad = 1.0
        # whatever a value went into is younger: when its turn comes, its grad is complete
        for value in sorted(found, key=lambda v: v.age, reverse=True):
            for part, slope in value.parts:
                part.grad += value.grad * slope         # added: a value may have gone into several others

def scalar_gpt(w, idx, c):
    """GPT.forward for one sequence, number by number. w: {name: nested lists of Value} -> a list of logits for each position"""
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    add = lambda a, b: [x + y for x, y in zip(a, b)]
    linear = lambda w, x: [dot(row, x) for row in w]
    rms_norm = lambda w, x: [a * b / (dot(x, x) / len(x) + c.norm_eps) ** 0.5 for a, b in zip(x, w)]
    silu = lambda x: x / ((x * -1).exp() + 1)

    def rope(x, t):
        half, out = len(x) // 2, [*x]
        for i in range(half):
            angle = t * c.rope_theta ** (-i / half)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    hs, x = c.n_embd // c.n_head, [w['wte.weight'][i] for i in idx]                     # x[t] has n_embd values
    for layer in range(c.n_layer):
        ln_1, ln_2, c_attn, c_proj, gate, up, down = (w[f'h.{layer}.{name}.weight'] for name in (
            'ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.gate', 'mlp.up', 'mlp.down'))
        qkv, y = [linear(c_attn, rms_norm(ln_1, a)) for a in x], [[] for _ in x]
        for head in range(c.n_head):
            q, k, v = ([row[i + head * hs:][:hs] for row in qkv] for i in (0, c.n_embd, 2 * c.n_embd))
            q, k = ([rope(a, t) for t, a in enumerate(rows)] for rows in (q, k))
            for t in range(len(x)):
                e = [(dot(q[t], k[s]) / hs ** 0.5).exp() for s in range(t + 1)]         # not what comes later
                y[t] += [dot(e, values) / sum(e) for values in zip(*v)]                 # dot ends where e does
        x = [add(a, linear(c_proj, b)) for a, b in zip(x, y)]
        for t, a in enumerate(x):
            a = rms_norm(ln_2, a)
            x[t] = add(x[t], linear(down, [silu(g) * u for g, u in zip(linear(gate, a), linear(up, a))]))
    return [linear(w['lm_head.weight'], rms_norm(w['ln_f.weight'], a)) for a in x]

def test_the_loss_and_every_gradient_are_those_of_the_chain_rule_number_by_number():
    c = GPTConfig(vocab_size=5, block_size=3, n_layer=2, n_head=2, n_embd=8, d_ff=4, rope_theta=50.0)
    model, batch = GPT(c).double(), torch.tensor([[3, 0, 2, 1], [4, 3, 3, 0]])
    model.compute_dtype = torch.float64
    for p in model.parameters():        # blocks begin as the identity: give them something to do
        p.data += 0.5 * torch.randn_like(p)
    loss = model(batch[:, :-1], batch[:, 1:])[1]
    loss.backward()

    nested = lambda f, x: [nested(f, y) for y in x] if isinstance(x, list) else f(x)
    w = {name: nested(Value, p.tolist()) for name, p in model.named_parameters()}
    losses = []
    for *idx, last in batch.tolist():
        for logits, target in zip(scalar_gpt(w, idx, c), [*idx[1:], last]):
            losses.append(sum(z.exp() for z in logits).log() - logits[target])          # -log softmax(logits)[target]
    mean = sum(losses) / len(losses)
    mean.backward()
    assert mean.data == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, p in model.named_parameters():
        grad = torch.tensor(nested(lambda v: v.grad, w[name]), dtype=torch.float64)
        assert (grad - p.grad).norm() < 1e-6 * p.grad.norm(), name

def test_rope_turns_by_relative_position():
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)
    at = lambda x, i: model_module.rope(x, torch.tensor([i]))
    score = lambda i, j: float((at(q, i) * at(k, j)).sum())
    assert score(3, 1) == pytest.approx(score(13, 11), abs=1e-5) and score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)
    close(at(q, 0), q, 1e-12)

def test_gpt2_has_its_published_number_of_parameters():
    with torch.device('meta'):
        model = GPT(GPTConfig(**GPT2))
    assert model.num_params() == 124_439_808
    assert model.wte.weight.size(0) == 50_304       # padded inside
    assert model.flops_per_token() == 6 * (124_439_808 - 1024 * 768 - 12 * 13 * 768 - 2 * 768) + 12 * 12 * 768 * 1024

@pytest.mark.parametrize('name', SETTINGS)
def test_no_position_sees_the_future_and_every_position_sees_the_past(name):
    model = GPT(tiny(**SETTINGS[name])).eval()
    for p in model.parameters():        # blocks begin as the identity: give them something to do
        p.data += 0.05 * torch.randn_like(p)
    idx = torch.randint(0, 50, (1, 16))
    before = model(idx)[0]
    idx[0, 9] = (idx[0, 9] + 1) % 50
    after = model(idx)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert ((before - after)[0, 9:].abs().amax(-1) > 1e-6).all()

@pytest.mark.parametrize('name', ['llama', 'gpt2', 'naive'])
def test_dropout_is_for_training_alone(name):
    torch.manual_seed(0)
    plain = GPT(tiny(**SETTINGS[name]))
    torch.manual_seed(0)
    model, idx = GPT(tiny(**SETTINGS[name], dropout=0.5)), torch.randint(50, (2, 16))
    for m in (plain, model):
        [p.data.add_(0.01) for p in m.parameters()]         # blocks begin as the identity
    assert torch.equal(model.eval()(idx)[0], plain(idx)[0]) and not torch.equal(model.train()(idx)[0], plain(idx)[0])

@pytest.mark.parametrize('name', SETTINGS)
def test_the_cache_changes_nothing(name):
    model = GPT(tiny(**SETTINGS[name])).eval()
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    idx = torch.randint(0, 50, (3, 16))
    want = model(idx)[0]
    cache = model.new_cache(3)
    got = [model(part, cache=cache)[0] for part in idx.split([5, 1, 1, 4, 5], dim=1)]      # prefill, single, several
    for end, logits in zip((5, 6, 7, 11, 16), got):
        close(logits[:, 0], want[:, end - 1], 2e-5)

@pytest.mark.parametrize('dtype, tol', [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize('settings', [{}, dict(n_kv_head=2), dict(qk_norm=True, n_kv_head=1)])
def test_flash_attention_equals_the_naive_form_forward_and_backward(settings, dtype, tol):
    flash, naive = (GPT(tiny(attention=a, **settings)).to(dtype) for a in ('flash', 'naive'))
    for p in flash.parameters():
        p.data += 0.1 * torch.randn_like(p)
    naive.load_state_dict(flash.state_dict())
    flash.compute_dtype = naive.compute_dtype = dtype
    idx = torch.randint(0, 50, (3, 17))
    logits, losses = zip(*(m(idx[:, :-1], idx[:, 1:]) for m in (flash, naive)))
    [loss.backward() for loss in losses]
    assert losses[0].dtype == dtype
    close(*logits, tol * 10), close(*losses, tol)
    for a, b in zip(flash.parameters(), naive.parameters()):
        close(a.grad, b.grad, tol)

@pytest.mark.skipif(not shutil.which('g++'), reason='no C++ compiler')
@pytest.mark.parametrize('dtype, tol', [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_compiled_training_has_the_loss_and_the_gradients_of_the_plain_one_in_float64(dtype, tol):
    settings = dict(qk_norm=True, n_kv_head=2, n_embd=64)
    model, true = GPT(tiny(**settings)), GPT(tiny(attention='naive', **settings)).double()
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    true.load_state_dict(model.state_dict())
    model.compute_dtype, true.compute_dtype = dtype, torch.float64
    idx = torch.randint(0, 50, (3, 17))
    got, want = torch.compile(model, dynamic=False)(idx[:, :-1], idx[:, 1:])[1], true(idx[:, :-1], idx[:, 1:])[1]
    got.backward(), want.backward()
    close(got.double(), want, tol)
    for (name, p), q in zip(model.named_parameters(), true.parameters()):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < 2 * tol, f'{name}: {error}'

@pytest.mark.parametrize('name', ['llama', 'tied', 'gpt2', 'qwen3', 'padded'])
def test_the_loss_starts_at_the_log_of_the_vocabulary(name):
    model = GPT(tiny(**{**dict(vocab_size=1000, n_embd=64), **SETTINGS[name]}))
    V = model.config.vocab_size
    idx = torch.randint(0, V, (64, 17))
    assert float(model(idx[:, :-1], idx[:, 1:])[1].detach()) == pytest.approx(math.log(V), rel=0.03)

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_one_batch_can_be_learned_by_heart(dtype):
    model = GPT(tiny(qk_norm=True, tie_weights=True))
    model.compute_dtype = dtype
    idx = torch.randint(0, 50, (4, 17))
    optimizer = train_module.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(120):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1

def test_initial_weights_have_their_spread_and_are_cut():
    model = GPT(tiny(n_embd=256, d_ff=1024, vocab_size=1000))
    assert float(model.wte.weight.detach().std()) == pytest.approx(0.987, rel=0.02) and float(model.wte.weight.detach().abs().max()) <= 3
    w, std = model.h[0].mlp.up.weight.detach(), math.sqrt(2 / (256 + 1024))
    assert float(w.std()) == pytest.approx(0.987 * std, rel=0.02) and float(w.abs().max()) <= 3 * std + 1e-6
    gpt2 = GPT(tiny(n_embd=256, n_layer=8, **GPT2))
    assert float(gpt2.h[0].mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert float(gpt2.h[0].attn.c_attn.weight.detach().std()) == pytest.approx(0.02, rel=0.03)

def test_the_padding_of_the_vocabulary_never_matters():
    model = GPT(tiny(vocab_size=1100))
    assert model.wte.weight.size(0) == 1152
    idx = torch.randint(0, 1100, (2, 17))
    optimizer = train_module.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
    assert logits.shape[-1] == 1100
    assert not model.wte.weight[1100:].any() and not model.lm_head.weight[1100:].any()
    assert model_module.export_tensors(model)['model.embed_tokens.weight'].shape == (1100, 32)

def jittered(config):
    """A model without the zeros and ones of a fresh one."""
    model = GPT(config).eval()
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    with torch.no_grad():
        for w in (model.wte.weight, model.lm_head.weight):
            w[config.vocab_size:] = 0
    return model

@pytest.mark.parametrize('name', SETTINGS)
def test_a_checkpoint_gives_the_same_model_back(name):
    model = jittered(tiny(**SETTINGS[name]))
    model_module.save_checkpoint('step_1', model, None, 49)
    again = model_module.load_model('step_1', attention=model.config.attention)
    assert again.config == model.config
    for (n, a), b in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(a, b), n

@pytest.mark.parametrize('name, theirs', [('gqa', 'LlamaForCausalLM'), ('biased llama', 'LlamaForCausalLM'), ('padded', 'LlamaForCausalLM'),
                                          ('qwen3', 'Qwen3ForCausalLM'), ('gpt2', 'GPT2LMHeadModel'), ('tied', 'LlamaForCausalLM')])
def test_transformers_opens_a_checkpoint_with_the_same_logits_and_continuation(name, theirs):
    import transformers
    model = jittered(tiny(**SETTINGS[name]))
    ByteTokenizer().save('tokenizer.json')
    model_module.save_checkpoint('step_1', model, 'tokenizer.json', None)
    hf = transformers.AutoModelForCausalLM.from_pretrained('step_1').eval()
    assert type(hf).__name__ == theirs
    idx = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        close(model(idx)[0], hf(idx).logits, 1e-5)
    greedy = torch.stack(list(sample_module.generate(model, idx[:, :4], 12, temperature=0)), 1)
    assert torch.equal(greedy, hf.generate(idx[:, :4], attention_mask=torch.ones(2, 4), max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 4:])
    tok = transformers.AutoTokenizer.from_pretrained('step_1')
    assert tok.eos_token == END_OF_TEXT and tok('hé')['input_ids'] == list('hé'.encode())

@pytest.mark.parametrize('kind', ['gpt2', 'llama', 'qwen3'])
def test_a_folder_that_transformers_saved_loads_with_the_same_logits(kind):
    import transformers as t
    shape = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
    hf = {'gpt2': lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4)),
          'llama': lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape, num_key_value_heads=2, rope_theta=5e5)),
          'qwen3': lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**shape, num_key_value_heads=2, head_dim=8))}[kind]().eval()
    hf.save_pretrained('hf')
    model = model_module.load_model('hf')
    idx = torch.randint(0, 60, (2, 32))
    with torch.no_grad():
        close(model(idx)[0], hf(idx).logits, 1e-5)

def test_gpt2_weights_as_the_hub_has_them_load_too():
    from safetensors.torch import load_file, save_file
    model = jittered(tiny(**GPT2))
    model_module.save_checkpoint('hub', model, None, 49)
    tensors = {k.removeprefix('transformer.'): v for k, v in load_file('hub/model.safetensors').items()}
    tensors['h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
    save_file(tensors, 'hub/model.safetensors')
    os.remove('hub/manifest.json')
    idx = torch.randint(0, 50, (1, 16))
    assert torch.equal(model_module.load_model('hub').eval()(idx)[0], model(idx)[0])

@pytest.mark.parametrize('damage, says', [
    (lambda p: p.write_bytes(p.read_bytes()[:-50]), 'damaged'), (lambda p: p.write_bytes(p.read_bytes() + b'x'), 'damaged'),
    (lambda p: p.write_bytes(p.read_bytes()[:900] + bytes([p.read_bytes()[900] ^ 1]) + p.read_bytes()[901:]), 'damaged'),
    (lambda p: p.unlink(), 'missing'),
])
def test_a_damaged_checkpoint_is_refused_by_name(damage, says):
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    damage(Path('step_1/model.safetensors'))
    with pytest.raises(UserError, match=f'model.safetensors is {says}'):
        model_module.load_model('step_1')

def signed(folder, **more):
    """Writes the manifest of a checkpoint anew, as someone would who made the files himself."""
    model_module.write_json(folder / 'manifest.json', {p.name: configurator.file_sha256(p) for p in folder.iterdir() if p.name != 'manifest.json'} | more)

@pytest.mark.parametrize('name', ['../step_1/config.json', './config.json', '..', '', 'x', 'a\0b'])
def test_a_manifest_names_files_of_its_own_folder(name):
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    signed(Path('step_1'), **{name: configurator.file_sha256('step_1/config.json')})
    with pytest.raises(UserError, match='is missing'):
        model_module.check_manifest('step_1')

@pytest.mark.parametrize('change, says', [
    (dict(model_type='mamba'), 'mamba'), (dict(hidden_size=64), 'shape|head_dim'), (dict(num_hidden_layers=3), 'lack'),
    (dict(num_hidden_layers=1), 'unknown'), (dict(rope_parameters=dict(rope_type='yarn')), 'yarn'), (dict(vocab_size='x'), 'describe|vocab'),
])
def test_a_foreign_folder_that_does_not_fit_is_refused(change, says):
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    os.remove('step_1/manifest.json')
    config = json.loads(Path('step_1/config.json').read_text())
    Path('step_1/config.json').write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=says):
        model_module.load_model('step_1')

@pytest.mark.parametrize('change', [
    dict(num_hidden_layers=10 ** 9), dict(num_hidden_layers=9999), dict(vocab_size=2 ** 62), dict(vocab_size=2 ** 28), dict(intermediate_size=2 ** 62),
    dict(max_position_embeddings=2 ** 62), dict(max_position_embeddings=2 ** 28), dict(num_attention_heads=2 ** 40), dict(hidden_size=2 ** 40),
    dict(rope_theta=math.nan, rope_parameters={}), dict(rope_theta=-1, rope_parameters={}), dict(rms_norm_eps=-1), dict(rms_norm_eps=math.inf), dict(vocab_size=True), dict(vocab_size=50.0),
    dict(vocab_size='50'), dict(hidden_size=10 ** 400), dict(hidden_size=10 ** 400, num_attention_heads=0.5), dict(rope_theta=10 ** 400, rope_parameters={}), dict(rope_parameters=[1]), dict(model_type=[]),
    dict(model_type='gpt_ablation', gpt_config=dict(n_layer=10 ** 9)), dict(model_type='gpt_ablation', gpt_config=[['n_layer', 1]]),
])
def test_a_config_that_claims_what_its_file_does_not_hold_is_refused_before_memory_is_taken(change):
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    os.remove('step_1/manifest.json')
    config = json.loads(Path('step_1/config.json').read_text())
    Path('step_1/config.json').write_text(json.dumps({**config, **change}))
    with at_most(100), pytest.raises(UserError, match='step_1'):
        model_module.load_model('step_1')

def test_a_context_of_a_million_tokens_opens():
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    os.remove('step_1/manifest.json')
    config = json.loads(Path('step_1/config.json').read_text())
    Path('step_1/config.json').write_text(json.dumps({**config, 'max_position_embeddings': 1 << 20}))
    assert model_module.load_model('step_1').config.block_size == 1 << 20

def with_header(raw, change):
    """A safetensors file whose header went through a function."""
    size = int.from_bytes(raw[:8], 'little')
    header = json.dumps(change(json.loads(raw[8:8 + size]))).encode()
    return len(header).to_bytes(8, 'little') + header + raw[8 + size:]

@pytest.mark.parametrize('damage, says', [
    (lambda raw: (2 ** 62).to_bytes(8, 'little') + raw[8:], 'can not read .*model.safetensors'), (lambda raw: b'', 'can not read .*model.safetensors'), (lambda raw: raw[:-1], 'can not read .*model.safetensors'),
    (lambda raw: with_header(raw, lambda h: {**h, 'model.norm.weight': {**h['model.norm.weight'], 'shape': [2 ** 62]}}), 'can not read .*model.safetensors'),
    (lambda raw: with_header(raw, lambda h: {**h, 'model.norm.weight': {**h['model.norm.weight'], 'shape': [4, 8]}}), r'shape \[4, 8\]'),
    (lambda raw: with_header(raw, lambda h: {**h, 'model.norm.weight': {**h['model.norm.weight'], 'dtype': 'I32'}}), 'I32'),
])
def test_weights_that_lie_about_themselves_are_refused(damage, says):
    model_module.save_checkpoint('step_1', GPT(tiny()), None, 0)
    os.remove('step_1/manifest.json')
    path = Path('step_1/model.safetensors')
    path.write_bytes(damage(path.read_bytes()))
    with at_most(100), pytest.raises(UserError, match=says):
        model_module.load_model('step_1')

def test_numbers_that_are_not_finite_load_as_they_are():
    from safetensors.torch import load_file, save_file
    model = GPT(tiny())
    model_module.save_checkpoint('step_1', model, None, 0)
    tensors = load_file('step_1/model.safetensors')
    for x in model.wte.weight.data, tensors['model.embed_tokens.weight']:
        x[3, 4], x[5, 6] = math.nan, -math.inf
    save_file(tensors, 'step_1/model.safetensors')
    signed(Path('step_1'))
    assert torch.equal(model_module.load_model('step_1').wte.weight.isfinite(), model.wte.weight.isfinite())

@pytest.mark.parametrize('name', ['llama', 'gpt2', 'qwen3', 'no norm'])
def test_a_hostile_checkpoint_is_one_error_or_a_model_and_takes_no_more_memory_than_its_size(name):
    model_module.save_checkpoint('step_1', GPT(tiny(**SETTINGS[name])), None, 0)
    manifest = json.loads(Path('step_1/manifest.json').read_text())
    config, raw, rng, opened = json.loads(Path('step_1/config.json').read_text()), Path('step_1/model.safetensors').read_bytes(), random.Random(2), 0
    header = int.from_bytes(raw[:8], 'little')
    with at_most(200):
        for i in range(2000 if LONG else 60):
            files = dict(config=json.dumps(config).encode(), manifest=b'', model=bytearray(raw))
            if i % 4 < 2:
                files['config'] = json.dumps(mutated(rng, config)).encode()
            elif i % 4 == 2:
                for _ in range(rng.choice([1, 1, 3])):
                    files['model'][rng.randrange(8 + header)] = rng.randrange(256)
                files['model'] = files['model'][:rng.choice([None, rng.randrange(len(raw))])]
            elif i % 8 == 3:
                files['model'] = with_header(raw, lambda h: mutated(rng, h))
            else:
                files['manifest'] = json.dumps(rng.choice([mutated(rng, manifest), {rng.choice(['..', '', 'x', '../step_1/config.json', '\0']): 'x'}])).encode()
            for file, data in zip(('config.json', 'manifest.json', 'model.safetensors'), files.values()):
                Path('step_1', file).write_bytes(data) if data else Path('step_1', file).unlink(missing_ok=True)
            try:
                opened += isinstance(model_module.load_model('step_1'), GPT)
            except UserError as e:
                assert 'step_1' in str(e)
    assert opened

@pytest.mark.parametrize('change', [dict(n_head=5), dict(n_kv_head=3), dict(norm='batch'), dict(mlp='relu'), dict(n_layer=0),
                                    dict(n_embd=12, n_head=4), dict(dropout=1.5), dict(rope_theta=0.0), dict(norm_eps=-1e-5), dict(dropout=math.nan),
                                    dict(n_layer=10 ** 9), dict(n_head=0), dict(block_size=1 << 26)])
def test_a_model_that_can_not_be_built_is_an_error(change):
    with pytest.raises(UserError):
        tiny(**change)

# -----------------------------------------------------------------------------
# train.py

def test_adamw_is_bit_equal_to_torchs():
    shapes = [(7, 5), (5,), (3, 4, 2)]
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, math.prod(s)).view(s)) for s in shapes] for _ in range(2))
    options = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    a, b = train_module.AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    for i in range(1000):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p) * (1 + i % 3)
            q.grad = p.grad.clone()
        a.param_groups[0]['lr'] = b.param_groups[0]['lr'] = 3e-3 * (1 - i / 2000)
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        assert torch.equal(p, q)

TORCHS = dict(sgd=lambda params: torch.optim.SGD(params, lr=1e-3, foreach=False),
              momentum=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=False),
              adagrad=lambda params: torch.optim.Adagrad(params, eps=1e-8, foreach=False),
              rmsprop=lambda params: torch.optim.RMSprop(params, alpha=0.95, foreach=False),
              adam=lambda params: torch.optim.Adam(params, betas=(0.9, 0.95), foreach=False),
              adamw=lambda params: torch.optim.AdamW(params, betas=(0.9, 0.95), foreach=False))

@pytest.mark.parametrize('rule', TORCHS)
@pytest.mark.parametrize('decay', [0.0, 0.1])
def test_every_optimizer_in_its_plain_form_does_what_torchs_does_in_100_steps(rule, decay):
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (35, 5)] for _ in range(2))
    name = next(name for name in ('SGD', 'Momentum', 'AdaGrad', 'RMSProp', 'Adam', 'AdamW') if name.lower() == rule)
    a = getattr(train_module, name)(ours, betas=(0.9, 0.95), weight_decay=decay)
    b = TORCHS[rule]([dict(params=theirs, weight_decay=decay)])
    for i in range(100):
        for p, q in zip(ours, theirs):
            p.grad, q.grad = [torch.randn_like(p).mul_(1 + i % 3)] * 2
        a.param_groups[0]['lr'] = b.param_groups[0]['lr'] = 1e-2 * (1 - i / 200)
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        assert float((q - torch.linspace(-1, 1, len(q))).detach().abs().max()) > 1e-2
        close(p.detach(), q.detach(), 1e-6)

@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('rule', TORCHS)
def test_the_optimizer_of_training_is_torchs_with_clipping_and_decay_of_matrices_only(rule, compiled):
    if compiled and (not shutil.which('g++') or rule not in ('adamw', 'adagrad')):
        pytest.skip('no C++ compiler, or tried with others')
    fast, plain = GPT(tiny(**GPT2)), GPT(tiny(**GPT2))
    plain.load_state_dict(fast.state_dict())
    a = train_module.FlatOptimizer(fast, (0.9, 0.95), weight_decay=0.1, extra=2, rule=rule)
    groups = [dict(params=[p for p in plain.parameters() if (p.dim() >= 2) == decayed], weight_decay=0.1 * decayed) for decayed in (True, False)]
    b = TORCHS[rule](groups)
    if compiled:
        a.compile()
    for step in range(100):
        for p, q in zip(fast.parameters(), plain.parameters()):
            q.grad = torch.randn_like(q) * 0.1
            p.grad.add_(q.grad)
        lr, max_norm = 3e-3 * (1 - step / 100), (0.5, 100.0, 0.0)[step % 3]
        norm = a.step(lr, max_norm)
        close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm or 1e9), 1e-5)
        for group in b.param_groups:
            group['lr'] = lr
        b.step()
        assert not a.g.any()
    for p, q in zip(fast.parameters(), plain.parameters()):
        close(p.detach(), q.detach(), 1e-6)
    assert {n: x.shape for n, x in a.views(a.m).items()} == {n: p.shape for n, p in fast.named_parameters()} | a.shapes

def test_orthogonalize_keeps_the_singular_vectors_and_brings_the_values_near_1():
    for a, b in ((40, 24), (24, 40), (32, 32)):
        x = torch.randn(3, a, b)
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        got = u.mT @ train_module.orthogonalize(x) @ vh.mT
        values = got.diagonal(dim1=1, dim2=2)
        close(got, torch.diag_embed(values), 1e-4)
        assert 0.6 < float(values[s / s.amax(1, keepdim=True) > 0.05].min()) and float(values.max()) < 1.25
    assert train_module.orthogonalize(torch.zeros(1, 4, 4)).isfinite().all()

@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='torch before 2.9')
@pytest.mark.parametrize('compiled', [False, True])
def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_others(compiled):
    if compiled and not shutil.which('g++'):
        pytest.skip('no C++ compiler')
    fast, plain = GPT(tiny(n_kv_head=2, d_ff=48)), GPT(tiny(n_kv_head=2, d_ff=48))
    plain.load_state_dict(fast.state_dict())
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    a = train_module.FlatOptimizer(fast, (0.9, 0.95), weight_decay=0.1, rule='muon')
    others = {name: p for name, p in plain.named_parameters() if not name.startswith('h.') or p.dim() < 2}
    b = torch.optim.AdamW([dict(params=[p], weight_decay=0.1 * (p.dim() >= 2)) for p in others.values()], lr=0.01, betas=(0.9, 0.95))
    if compiled:
        a.compile()
    # those of torch: each matrix for itself, and queries, keys and values each for themselves
    rows = {name: (32, 16, 16) if 'c_attn' in name else len(p) for name, p in plain.named_parameters() if name not in others}
    parts = [(torch.nn.Parameter(w), p, k, i) for name, p in plain.named_parameters() if name in rows
             for k in [rows[name]] for i, w in enumerate(p.data.split(k))]
    c = torch.optim.Muon([w for w, *_ in parts], lr=0.01, weight_decay=0.1, adjust_lr_fn='match_rms_adamw')
    for _ in range(5):
        for p, q in zip(fast.parameters(), plain.parameters()):
            q.grad = torch.randn_like(q) * 0.1
            p.grad.add_(q.grad)
        a.step(0.01, 0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for w, p, k, i in parts:
            w.grad = p.grad.split(k)[i]
        b.step(), c.step()
        assert not a.g.any()
    for (name, p), q in zip(fast.named_parameters(), plain.parameters()):
        error = (p - q).norm() / (q - before[name]).norm()
        assert error < (1e-5 if name in others else 2e-2), f'{name}: {error}'       # theirs computes in bfloat16
    assert a.views(a.v).keys() == others.keys() and a.views(a.m).keys() == dict(plain.named_parameters()).keys()

@pytest.mark.parametrize('muon', [False, True])
@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, compiled, muon):
    if compiled and not shutil.which('g++'):
        pytest.skip('no C++ compiler')
    model = GPT(tiny())
    model.compute_dtype = dtype
    optimizer = train_module.FlatOptimizer(model, rule='muon' if muon else 'adamw')
    if compiled:
        optimizer.compile()
    torch.manual_seed(0)
    step = lambda bad: ([g.normal_() for g in optimizer.views(optimizer.g).values()], optimizer.g[5:6].fill_(bad), optimizer.step(0.1, 1.0))
    scale, beta1 = float(optimizer.loss_scale), optimizer.betas[0]
    step(1.0)
    torch.manual_seed(0)
    norm = math.sqrt(sum(float(torch.randn(shape).norm()) ** 2 for shape in optimizer.shapes.values())) / scale
    assert muon or float(optimizer.m.norm()) == pytest.approx((1 - beta1) * min(norm, 1.0), rel=1e-2)
    before = [x.clone() for x in (optimizer.p, optimizer.m, optimizer.v, optimizer.t)]
    for bad in (math.nan, math.inf, -math.inf):
        step(bad)
        assert all(map(torch.equal, before, (optimizer.p, optimizer.m, optimizer.v, optimizer.t)))
        assert not optimizer.g.any() if dtype == torch.float16 else not optimizer.g.isfinite().all() and optimizer.steps == 2
    step(1.0)
    if dtype == torch.float16:      # an overflow: a smaller scale, and on
        assert scale == 65536 and optimizer.loss_scale == scale / 8 and optimizer.alive and optimizer.t == 2
        optimizer.t.fill_(1999)
        step(1.0)
        assert optimizer.loss_scale == scale / 4
        while optimizer.alive:
            step(math.inf)
        assert 0 < optimizer.loss_scale <= 1e-3
    else:                           # nothing from that step on
        assert not optimizer.alive and torch.equal(before[0], optimizer.p) and optimizer.t == 1 and scale == 1

@pytest.mark.parametrize('max_norm', [0.5, 100.0, 0.0])
def test_clipping_equals_torchs(max_norm):
    params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(7))]
    grads = [torch.randn_like(p) for p in params]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    norm = train_module.clip_grad_norm(params, max_norm)
    ours = [p.grad.clone() for p in params]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    want = torch.nn.utils.clip_grad_norm_(params, max_norm or 1e9)
    close(norm, want, 1e-6)
    for a, p in zip(ours, params):
        close(a, p.grad, 1e-6)

def test_the_schedule_warms_up_decays_as_a_cosine_and_stays():
    lr = lambda it: train_module.get_lr(it, 1.0, 0.1, 10, 110)
    assert [lr(0), lr(5), lr(10)] == [0.0, 0.5, 1.0] and lr(60) == pytest.approx(0.55)
    assert lr(110) == lr(1000) == 0.1 and lr(109) > 0.1
    assert all(lr(i) >= lr(i + 1) for i in range(10, 110))
    assert train_module.get_lr(0, 1.0, 0.0, 0, 10) == 1.0

def test_every_window_comes_once_per_epoch_in_another_order_each_time():
    n_tokens, T = 1003, 10
    n = (n_tokens - T) // T
    epochs = [prepare_module.window_starts(e * n, n, n_tokens, T, seed=3) for e in range(3)]
    for starts in epochs:
        assert len({s // T for s in starts}) == n and len({s % T for s in starts}) == 1
        assert min(starts) >= 0 and max(starts) + T + 1 <= n_tokens
    assert len({tuple(s) for s in epochs}) == 3 and epochs[0] != prepare_module.window_starts(0, n, n_tokens, T, seed=4)
    together = prepare_module.window_starts(0, 3 * n, n_tokens, T, seed=3)        # however it is asked for
    assert together == sum(epochs, [])
    assert prepare_module.epoch_order(1, 0, 100, 8)[:5].tolist() == [23, 39, 15, 71, 55]      # the same on every machine

def test_targets_are_the_next_tokens():
    write_corpus()
    folder, meta, ids, _ = prepared('--dataset=corpus.txt', '--vocab_size=300')
    x, y = prepare_module.Shards(folder, 'train', meta).batch([0, 50], 8)
    assert x[0].tolist() == ids['train'][:8] and y[0].tolist() == ids['train'][1:9] and y[1].tolist() == ids['train'][51:59]
    assert x.dtype == torch.int64

def test_evaluation_is_the_mean_over_every_token_of_the_split():
    write_corpus()
    folder, meta, ids, tok = prepared('--dataset=corpus.txt', '--vocab_size=300')
    shards, model = prepare_module.Shards(folder, 'val', meta), GPT(tiny(vocab_size=300))
    model.train()
    val, total = torch.tensor(ids['val']), 0.0
    with torch.no_grad():
        for s in range(0, len(val) - 1, 16):
            x, y = val[s:min(s + 16, len(val) - 1)], val[s + 1:s + 17]
            total += float(model(x[None], y[None])[1]) * len(y)
    for micro in (1, 3, 8):
        assert train_module.evaluate(model, model, shards, 16, micro, 0, 'cpu') == pytest.approx(total / (len(val) - 1), abs=1e-6)
    assert model.training

SMALL = ['--dataset=corpus.txt', '--vocab_size=300', '--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=8',
         '--warmup_iters=2', '--eval_tokens=320', '--log_interval=1', '--sample_tokens=8', '--dtype=float32', '--compile=False']

class Started(Exception):
    """Nothing that was asked for was refused."""

def started(*args, **kw):
    raise Started

def train_here(*args):
    """train.py in this process: -> (result of main, log, newest checkpoint)"""
    if not os.path.exists('corpus.txt'):
        write_corpus()
    result = script('train', *SMALL, *args).main()
    run = result['run']
    return result, train_module.read_log(run / 'log.jsonl'), (model_module.checkpoints(run) or [None])[-1]

def losses(log):
    return [e['loss'] for e in log if 'loss' in e]

def weights(checkpoint):
    from safetensors.torch import load_file
    return {**load_file(checkpoint / 'model.safetensors'), **load_file(checkpoint / 'training.safetensors')}

def same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return all(torch.equal(a[k], b[k]) for k in a)

def test_a_run_leaves_what_was_promised():
    result, log, last = train_here('--max_iters=12', '--eval_interval=5')
    run = result['run']
    assert run == Path('out/corpus') and last.name == 'step_00000012'
    assert [e['step'] for e in log if 'loss' in e] == list(range(12)) and [e['step'] for e in log if 'val_loss' in e] == [5, 10, 12]
    assert {'step', 'tokens', 'loss', 'lr', 'grad_norm', 'tokens_per_second', 'mfu', 'seconds'} == set(log[0])
    assert {'step', 'tokens', 'seconds', 'val_loss', 'val_bpb'} == set(log[-1])
    assert (run / 'curves.png').read_bytes()[:4] == b'\x89PNG'
    assert losses(log)[-1] < losses(log)[0]
    assert {p.name for p in last.iterdir()} == {
        'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
        'training.json', 'training.safetensors', 'manifest.json'}
    assert train_here('--max_iters=2')[0]['run'] == Path('out/corpus-2')

@pytest.mark.parametrize('extra', [(), ('--dropout=0.2', '--micro_batch_size=4'), ('--optimizer=adamw', '--bias', '--beta2=0'), ('--dtype=bfloat16', '--qk_norm=False', '--norm=layer')])
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(extra):
    _, straight, a = train_here('--max_iters=20', '--eval_interval=100', '--out_dir=a', *extra)
    train_here('--max_iters=20', '--eval_interval=7', '--out_dir=b', *extra)
    for p in model_module.checkpoints('b')[1:]:
        shutil.rmtree(p)
    shutil.copytree('b', 'c')
    assert model_module.checkpoints('b')[-1].name in ('step_00000007', 'step_00000014')
    _, log, b = train_here('--max_iters=20', '--eval_interval=100', '--out_dir=b', '--init_from=resume', *extra)
    assert same_weights(a, b) and losses(log) == losses(straight)
    resumed = script('train', 'c/config.py', '--init_from=auto', '--out_dir=c').main()       # the command that is printed
    assert same_weights(a, model_module.checkpoints(resumed['run'])[-1])

def test_training_is_what_a_dozen_lines_with_torchs_own_optimizer_do():
    _, log, last = train_here('--max_iters=6', '--seed=5', '--optimizer=adamw', '--learning_rate=3e-3', '--weight_decay=0', '--grad_clip=0.5')
    data = prepare_module.Shards('data/corpus-bpe300', 'train', prepare_module.read_meta(Path('data/corpus-bpe300')))
    torch.manual_seed(5)
    model = GPT(GPTConfig(vocab_size=300, n_layer=2, n_head=2, n_embd=32, block_size=16, tie_weights=True, qk_norm=True))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, foreach=False)
    for step, entry in enumerate(e for e in log if 'loss' in e):
        starts = prepare_module.window_starts(8 * step, 8, len(data), 16, seed=5)
        rows = torch.tensor(np.stack([data.read(s, 17) for s in starts]).astype(np.int64))
        logits, _ = model(rows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 300), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]['lr'] = 3e-3 * (step + 1) / 2 if step < 1 else 1.5e-3 * (1 + math.cos(math.pi * (step - 1) / 4))
        optimizer.step()
        assert (entry['loss'], entry['grad_norm']) == pytest.approx((float(loss.detach()), float(norm)), rel=1e-5)
    close(weights(last)['model.embed_tokens.weight'], model.wte.weight.detach(), 1e-6)

def test_evaluating_does_not_disturb_training():
    _, often, a = train_here('--max_iters=9', '--eval_interval=2', '--dropout=0.1', '--out_dir=a')
    _, never, b = train_here('--max_iters=9', '--eval_interval=99', '--dropout=0.1', '--out_dir=b')
    assert losses(often) == losses(never) and same_weights(a, b)

def test_dropout_is_fresh_at_every_step_and_micro_batch():
    Path('a.txt').write_text('a' * 4000)        # every window is the same, so losses differ by dropout alone
    args = ['--dataset=a.txt', '--tokenizer=byte', '--max_iters=6', '--learning_rate=0']
    assert len(set(losses(train_here(*args, '--out_dir=a')[1]))) == 1
    assert len(set(losses(train_here(*args, '--dropout=0.5', '--micro_batch_size=4', '--out_dir=b')[1]))) == 6
    one = train_here(*args, '--dropout=0.5', '--batch_size=1', '--out_dir=c')[1]
    two = train_here(*args, '--dropout=0.5', '--batch_size=2', '--micro_batch_size=1', '--out_dir=d')[1]
    assert all(abs(x - y) > 1e-6 for x, y in zip(losses(one), losses(two)))     # the second micro-batch has its own

def test_accumulation_is_the_same_as_one_large_batch():
    logs = [train_here('--max_iters=10', f'--micro_batch_size={m}', f'--out_dir=m{m}')[1] for m in (0, 4, 1)]
    for log in logs[1:]:
        assert losses(log) == pytest.approx(losses(logs[0]), abs=1e-5)

def test_old_checkpoints_go_and_the_best_stays():
    _, log, _ = train_here('--max_iters=24', '--eval_interval=3', '--learning_rate=5', '--min_lr=5', '--warmup_iters=20', '--keep_checkpoints=2')
    evaluated = {e['step']: e['val_loss'] for e in log if 'val_loss' in e}
    best = min(evaluated, key=evaluated.get)
    assert best < 21
    assert [int(p.name[5:]) for p in model_module.checkpoints('out/corpus')] == [best, 21, 24]

def test_a_complete_run_says_so_and_a_taken_folder_is_refused(capsys):
    train_here('--max_iters=3', '--out_dir=a')
    train_here('--max_iters=3', '--out_dir=a', '--init_from=resume')
    assert 'is complete at step 3' in capsys.readouterr().out
    with pytest.raises(UserError, match='already holds a run'):
        train_here('--max_iters=3', '--out_dir=a')
    with pytest.raises(UserError, match='no checkpoint'):
        train_here('--max_iters=3', '--out_dir=nothing', '--init_from=resume')
    for knob, names in ('--n_embd=64', 'n_embd'), ('--optimizer=adamw', 'optimizer = muon, not adamw'):
        with pytest.raises(UserError, match=names):
            train_here('--max_iters=9', '--out_dir=a', '--init_from=resume', knob)

def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(capsys):
    _, straight, a = train_here('--max_iters=9', '--eval_interval=3', '--out_dir=a')
    shutil.copytree('a', 'b')
    path = Path('b/step_00000009/training.safetensors')
    path.write_bytes(path.read_bytes()[:-1])
    _, _, b = train_here('--max_iters=9', '--eval_interval=3', '--out_dir=b', '--init_from=resume')
    assert same_weights(a, b)
    out = capsys.readouterr().out
    assert 'training.safetensors is damaged' in out and 'resumed b/step_00000006' in out.replace(os.sep, '/')

def test_a_checkpoint_or_a_hugging_face_folder_starts_a_new_run_with_its_own_tokenizer():
    _, _, first = train_here('--max_iters=3', '--out_dir=a')
    write_corpus('new.txt', 22)
    result, log, last = train_here('--max_iters=2', '--dataset=new.txt', f'--init_from={first}', '--n_embd=1000', '--out_dir=b')
    assert json.loads((last / 'config.json').read_text())['hidden_size'] == 32
    assert (last / 'tokenizer.json').read_bytes() == (first / 'tokenizer.json').read_bytes()
    os.remove(first / 'manifest.json')      # now it is a folder from elsewhere
    _, again, _ = train_here('--max_iters=2', '--dataset=new.txt', f'--init_from={first}', '--out_dir=c')
    assert losses(again) == losses(log) and losses(log)[0] < math.log(300)
    more = script('train', 'b/config.py', '--init_from=resume', '--max_iters=4').main()       # it goes on as what it is
    assert more['step'] == 4

def test_nanogpts_pair_of_files_works_as_it_is(capsys):
    Path('nano').mkdir()
    rng = np.random.default_rng(0)
    for split, n in (('train', 4000), ('val', 500)):
        rng.integers(0, 50257, n).astype(np.uint16).tofile(f'nano/{split}.bin')
    result, log, last = train_here('--dataset=nano', '--max_iters=2', '--n_embd=8')
    out = capsys.readouterr().out
    assert 'taken as tokens of GPT-2' in out and 'bits per byte |' not in out and result['val_bpb'] is None
    assert losses(log)[0] == pytest.approx(math.log(50257), rel=0.03)
    np.arange(4000, dtype=np.uint16).tofile('nano/train.bin')
    with pytest.raises(UserError, match='was trained on other data'):
        script('train', result['run'] / 'config.py', '--init_from=resume', '--max_iters=4').main()

def test_a_diverging_run_stops_with_status_3_and_saves_nothing_bad():
    write_corpus()
    done = launch(HERE / 'train.py', *SMALL, '--max_iters=400', '--eval_interval=20', '--learning_rate=1e30', '--grad_clip=0', '--out_dir=a')
    assert done.returncode == 3 and 'diverged: ' in done.stderr and 'Traceback' not in done.stderr
    for checkpoint in model_module.checkpoints('a'):
        assert all(torch.isfinite(w).all() for w in weights(checkpoint).values())

def test_a_run_that_is_stopped_finishes_what_wandb_has(monkeypatch):
    class Fake:
        calls = []
        def init(self, **kw): pass
        def log(self, *a, **kw): os.kill(os.getpid(), signal.SIGTERM)
        def finish(self): self.calls.append('finish')
    monkeypatch.setitem(sys.modules, 'wandb', Fake())
    with pytest.raises(SystemExit, match='143'):
        train_here('--max_iters=40', '--wandb_log=True', '--out_dir=a')
    assert Fake.calls == ['finish']

def test_without_matplotlib_there_is_no_picture_and_no_failure(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert not (train_here('--max_iters=2')[0]['run'] / 'curves.png').exists()
    assert 'pip install matplotlib' in capsys.readouterr().out

@pytest.mark.parametrize('cuda, mps, want', [(True, False, 'cuda:1'), (False, True, 'mps'), (False, False, 'cpu')])
def test_the_device_is_what_there_is(cuda, mps, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda place: 'a card')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    assert model_module.choose_device('auto', local_rank=1)[0] == want
    if cuda:
        with pytest.raises(UserError, match='has 2 GPUs'):
            model_module.choose_device('auto', local_rank=2)
        def no_such(place):
            raise AssertionError('Invalid device id')
        monkeypatch.setattr(torch.cuda, 'get_device_name', no_such)
        with pytest.raises(UserError, match='from cuda:0 on'):
            model_module.choose_device('cuda:7')

@pytest.mark.parametrize('place, faked, want', [
    ('cuda:0', dict(gpu=True), 'bfloat16'), ('cuda:0', dict(gpu=False, capability=7), 'float16'),
    ('cuda:0', dict(gpu=False, capability=6), 'float32'), ('mps', {}, 'float32'),
    ('cpu', dict(amx=False, avx=False), 'float32'), ('cpu', dict(amx=True, avx=False), 'bfloat16'), ('cpu', dict(amx=False, avx=True), 'bfloat16')])
def test_bfloat16_is_used_only_where_the_hardware_has_it(place, faked, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda **kw: faked['gpu'])
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: faked['amx'], raising=False)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: faked['avx'], raising=False)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda place: (faked['capability'], 0))
    value, why = model_module.choose_dtype('auto', place)
    assert value == want and why

def test_compiling_falls_back_where_triton_a_compiler_or_the_card_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda place: (9, 0))
    monkeypatch.setitem(sys.modules, 'triton', None)
    choose = model_module.choose_compile
    assert choose('auto', 'cuda:0') == (False, 'Triton is not installed')
    monkeypatch.setitem(sys.modules, 'triton', torch)
    assert choose('auto', 'cuda:0')[0] is True and choose(False, 'cuda:0') == (False, 'as asked')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda place: (6, 1))
    assert choose('auto', 'cuda:0')[0] is False
    monkeypatch.setattr(shutil, 'which', lambda name: '/usr/bin/' + name)
    assert choose('auto', 'cpu', seconds=80)[0] is False and choose('auto', 'cpu', seconds=100)[0] is True
    assert choose(True, 'cpu') == (True, 'as asked') and choose(True, 'mps')[0] is False
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    assert choose(True, 'cpu') == choose('auto', 'cpu', seconds=1e6) == (False, 'no C++ compiler was found')
    with pytest.raises(UserError, match='give True, False or auto'):
        choose('maybe', 'cpu')

def test_a_compile_that_fails_falls_back_to_eager(monkeypatch, capsys):
    def broken(model, dynamic):
        def forward(*args):
            raise RuntimeError('no luck')
        return forward
    monkeypatch.setattr(torch, 'compile', broken)
    train_here('--max_iters=2', '--compile=True', '--out_dir=a')
    assert 'compile   | False (it failed: no luck)' in capsys.readouterr().out

def test_what_auto_meant_is_kept_when_a_run_is_resumed(monkeypatch):
    train_here('--max_iters=4', '--eval_interval=2', '--out_dir=a', '--dtype=auto', '--compile=auto')
    auto = configurator.read_json(model_module.checkpoints('a')[-1] / 'training.json')['auto']
    assert auto == dict(device='cpu', dtype=auto['dtype'], compile=False, micro_batch_size=8)
    other = 'float32' if auto['dtype'] == 'bfloat16' else 'bfloat16'
    module = script('train', 'a/config.py', '--init_from=resume', '--max_iters=6')
    module.choose_dtype = lambda dtype, place: (other, 'another machine')
    module.estimate = lambda *args: 1e6         # by which it would compile
    module.main()
    assert configurator.read_json(model_module.checkpoints('a')[-1] / 'training.json')['auto'] == auto

@pytest.mark.parametrize('args, seconds', [(('--max_iters=10',), 10), (('--max_iters=2000', '--max_minutes=0.5'), 30),
                                           (('--max_iters=10', '--eval_only'), 0)])
def test_compiling_is_decided_by_the_time_that_will_be_spent_in_steps(args, seconds):
    write_corpus()
    module, asked = script('train', *SMALL, '--out_dir=a', *args), []
    module.estimate = lambda model, batch, place: len(batch[0]) / 8
    def choose(compile, place, seconds):
        asked.append(seconds)
        raise UserError('enough')
    module.choose_compile = choose
    with pytest.raises(UserError, match='enough'):
        module.main()
    assert asked == pytest.approx([seconds], rel=0.05)       # and the optimizer's few milliseconds

def test_a_dtype_that_is_none_is_found_before_any_data_are_prepared():
    write_corpus()
    with pytest.raises(UserError, match="dtype = 'float8'"):
        script('train', *SMALL, '--dtype=float8').main()
    assert not os.path.exists('data')

def test_a_micro_batch_that_does_not_fit_is_halved_and_one_that_was_asked_for_is_an_error(monkeypatch):
    write_corpus()
    def estimate(model, batch, place):
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError('too large')
        return 0.01
    for asked, found in (0, 2), (1, 1):
        module = script('train', *SMALL, '--max_iters=2', f'--micro_batch_size={asked}', '--batch_size=12', f'--out_dir=a{asked}')
        module.estimate = estimate
        module.main()
        assert configurator.read_json(model_module.checkpoints(f'a{asked}')[-1] / 'training.json')['auto']['micro_batch_size'] == found
    module = script('train', *SMALL, '--max_iters=2', '--micro_batch_size=6', '--batch_size=12', '--out_dir=b')
    module.estimate = estimate
    with pytest.raises(UserError, match='try --micro_batch_size=3, which trains the same'):
        module.main()

def test_a_time_budget_leaves_the_warm_up_alone():
    schedule = script('train', '--max_minutes=1', '--max_iters=1000', '--warmup_iters=100').schedule
    assert schedule(5, 59, 0) == 6 and schedule(100, 30, 0) == 500 and schedule(100, 30, 20) == 250 and schedule(700, 30, 0) == 701

def test_a_time_budget_takes_the_schedule_to_its_end(monkeypatch, capsys):
    write_corpus()
    module = script('train', *SMALL, '--max_iters=1000000', '--max_minutes=1', '--warmup_iters=100', '--out_dir=a')
    now = itertools.count(step=0.05)            # every look at the clock is 50 ms later
    monkeypatch.setattr(time, 'perf_counter', lambda: next(now))
    result = module.main()
    log = [e for e in train_module.read_log(Path('a/log.jsonl')) if 'loss' in e]
    rates = [e['lr'] for e in log]
    top = rates.index(max(rates))
    assert 100 < result['step'] < 2000 and rates[-1] < 0.001 * max(rates)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    again = script('train', 'a/config.py', '--init_from=resume').main()
    assert again['step'] == result['step']      # it is complete
    assert '--max_minutes=2' in capsys.readouterr().out

def test_float16_trains_with_a_scaled_loss():
    _, log, last = train_here('--max_iters=30', '--dtype=float16', '--learning_rate=1e-2')
    assert losses(log)[-1] < losses(log)[0] - 0.5
    _, full, _ = train_here('--max_iters=30', '--learning_rate=1e-2')
    assert losses(log)[:3] == pytest.approx(losses(full)[:3], rel=3e-3)
    state = configurator.read_json(last / 'training.json')
    assert state['loss_scale'] >= 1024 and state['updates'] + math.log2(65536 / state['loss_scale']) == 30

@pytest.mark.parametrize('before, after', [('float16', 'float32'), ('float32', 'float16')])
def test_a_run_may_go_on_in_another_dtype(before, after):
    _, straight, _ = train_here('--max_iters=30')
    train_here('--max_iters=15', '--lr_decay_iters=30', f'--dtype={before}', '--out_dir=b')
    _, log, last = train_here('--max_iters=30', f'--dtype={after}', '--out_dir=b', '--init_from=resume')
    assert losses(log) == pytest.approx(losses(straight), rel=3e-3)
    assert (configurator.read_json(last / 'training.json')['loss_scale'] > 1) == (after == 'float16')

def test_an_interrupt_in_an_evaluation_is_obeyed_at_once_and_loses_nothing(monkeypatch):
    _, straight, a = train_here('--max_iters=6', '--eval_interval=3', '--out_dir=a')
    for out, nth, step in (('b', 1, 3), ('c', 2, 6)):       # during the run, and in the last one
        module, before, batches = script('train', *SMALL, '--max_iters=6', '--eval_interval=3', f'--out_dir={out}'), signal.getsignal(signal.SIGINT), []
        evaluate, calls = module.evaluate, []
        def interrupted(model, fast, shards, *args):
            calls.append(1)
            if len(calls) == nth:
                real = shards.batch
                shards.batch = lambda *args: (batches.append(1), len(batches) == 1 and os.kill(os.getpid(), signal.SIGINT), real(*args))[2]
            return evaluate(model, fast, shards, *args)
        module.evaluate = interrupted
        with pytest.raises(SystemExit, match='130'):
            module.main()
        assert len(batches) == 1 and model_module.checkpoints(out)[-1].name == f'step_0000000{step}'
        assert signal.getsignal(signal.SIGINT) == before
        _, log, last = train_here('--max_iters=6', '--eval_interval=3', f'--out_dir={out}', '--init_from=resume')
        assert same_weights(a, last)
        assert [{k: e[k] for k in e if 'loss' in k or k == 'step'} for e in log] == [{k: e[k] for k in e if 'loss' in k or k == 'step'} for e in straight]
    module = script('train', 'c/config.py', '--init_from=resume', '--eval_only')        # which has nothing to save
    module.evaluate = lambda *args: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        module.main()

def test_processes_that_found_different_checkpoints_do_not_train_together(monkeypatch):
    module, model = script('train', *SMALL), GPT(tiny())
    optimizer, data = module.FlatOptimizer(model), script('bench').RandomTokens(50)
    module.all_reduce = lambda found, op: found[2].sub_(7)      # another one is 7 steps behind
    with pytest.raises(UserError, match='found different checkpoints'):
        module.find_speed(model, optimizer, data, 16, 'cpu', 2, 10, {}, print)

AUTO = dict(device='cpu', dtype='float32', compile=False, micro_batch_size=8)

@pytest.mark.parametrize('change', [
    dict(step=-1), dict(step=2 ** 62), dict(step=1.0), dict(step=True), dict(updates=2 ** 62), dict(updates=None), dict(loss_scale=1e300), dict(loss_scale=math.nan),
    dict(seconds=-math.inf), dict(began='x'), dict(val={}), dict(val=[1]), dict(val=[['x', 1.0]]), dict(val=[[1, 1.0, 2]]), dict(optimizer=1), dict(auto=[]), dict(windows=-1), dict(knobs=[]),
    *(dict(auto={**AUTO, **change}) for change in (dict(dtype='int8'), dict(dtype=[]), dict(compile='x'), dict(micro_batch_size=0), dict(micro_batch_size='8')))])
def test_a_state_of_training_that_no_run_has_is_refused(change):
    state = dict(step=3, windows=24, knobs={}, updates=3, seconds=0.5, began=0.1, loss_scale=1.0, val=[[3, 1.5]], optimizer='muon', auto=AUTO)
    Path('training.json').write_text(json.dumps(state))
    assert model_module.read_state(Path('.')) == state
    Path('training.json').write_text(json.dumps({**state, **change}))
    with pytest.raises(UserError, match='training.json'):
        model_module.read_state(Path('.'))

def test_a_hostile_state_of_training_is_one_error_or_resumes():
    _, _, last = train_here('--max_iters=2', '--out_dir=a')
    state, rng, resumed = json.loads((last / 'training.json').read_text()), random.Random(3), 0
    for i in range(600 if LONG else 5):
        (last / 'training.json').write_text(json.dumps(mutated(rng, state) if i else state))
        signed(last)
        module = script('train', *SMALL, '--out_dir=a', '--init_from=resume', '--max_iters=4', '--dtype=auto', '--compile=auto')
        module.start_files = started
        try:
            module.main()           # is complete where the state says so
        except Started:
            resumed += 1
        except UserError as e:
            assert 'training.json' in str(e) or 'was trained on' in str(e) or 'resume it with its own config.py' in str(e)
    assert resumed

def test_moments_that_do_not_fit_are_refused():
    from safetensors.torch import load_file, save_file
    _, _, last = train_here('--max_iters=2', '--out_dir=a')
    tensors = load_file(last / 'training.safetensors')
    name, x = 'm.ln_f.weight', tensors.pop('m.ln_f.weight')
    for change, says in (({}, 'lacks m.ln_f'), ({name: torch.zeros(99)}, 'has shape'), ({name: x.long()}, 'I64'), ({name: x, 'x': x.clone()}, 'unknown x')):
        save_file({**tensors, **change}, last / 'training.safetensors')
        signed(last)
        with pytest.raises(UserError, match=says):
            train_here('--max_iters=4', '--out_dir=a', '--init_from=resume')

def test_without_fork_a_new_python_does_the_work():
    write_corpus()
    Path('spawn.py').write_text(f'''
import sys
sys.path.insert(0, {str(HERE)!r})
import configurator, tokenizer
configurator.BLOCK, configurator.SMALL, configurator.START_METHOD = 2000, 1, 'spawn'     # as on Windows and macOS
if __name__ == '__main__':
    print(len(tokenizer.train_bpe('corpus.txt', 300, workers=2)[1]))
''')
    assert launch('spawn.py', check=0).stdout.strip() == '44'

def test_a_run_made_for_a_gpu_says_what_it_takes_here(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['train.py', str(HERE / 'config/train_tinystories.py')])
    write_corpus()
    module = script('train', *SMALL, '--max_iters=3', '--out_dir=a')
    module.estimate = lambda *a: 1e6
    module.choose_compile = lambda *a: (False, '')
    module.main()
    out = capsys.readouterr().out
    assert 'about 34.7 days here; smaller: python train.py' in out and 'train_tinystories_cpu.py' in out

@pytest.mark.parametrize('args, says', [
    (['--max_iter=3'], 'max_iters'), (['--batch_size=1.5'], 'whole number'), (['--dataset=nowhere.txt'], 'nowhere.txt'),
    (['--init_from=nowhere'], 'init_from'), (['--micro_batch_size=3'], 'micro_batch_size'), (['--block_size=100000'], 'block_size'),
    (['--vocab_size=256'], 'vocab_size'), (['--n_head=5'], 'n_head'), (['--device=cuda'], '--device=cpu'), (['--dtype=int8'], 'dtype'),
    (['--max_iters=0'], 'max_iters'), (['--beta2=1.5'], 'beta2'), (['--dataset=empty.txt'], 'no text'), (['--dataset=latin.txt'], 'byte 3'),
    (['--init_from=resume'], 'resume'),
])
def test_what_a_person_can_get_wrong_is_one_line_and_status_2(args, says):
    write_corpus()
    Path('empty.txt').write_bytes(b'')
    Path('latin.txt').write_bytes('abcé'.encode('latin-1'))
    assert says in one_line(launch(HERE / 'train.py', *SMALL, *args))

def test_errors_of_the_other_scripts_are_one_line_too():
    assert 'python train.py' in one_line(launch(HERE / 'sample.py'))
    assert 'there is no checkpoint' in one_line(launch(HERE / 'sample.py', '--out_dir=nowhere'))
    assert 'no data set' in one_line(launch(HERE / 'prepare.py', '--dataset=nowhere'))
    assert 'steps' in one_line(launch(HERE / 'bench.py', '--steps=0'))

def test_a_range_test_raises_the_rate_until_the_loss_rises_and_suggests_one(capsys):
    result, log, last = train_here('--lr_schedule=find', '--learning_rate=1000', '--max_iters=60', '--optimizer=adamw')
    out, rates = capsys.readouterr().out, [e['lr'] for e in log]
    assert last is None and result['val_loss'] is None and result['step'] == len(log) < 60
    close(torch.tensor(rates), 1000 * 1e-5 ** (1 - torch.arange(1, len(log) + 1) / 60), 1e-5)
    assert losses(log)[-1] > min(losses(log)) + 1 > losses(log)[-2]
    suggested = train_module.suggest_lr(log)
    assert f'--learning_rate={suggested:.1e}' in out and 1e-3 < suggested < 1 and (result['run'] / 'curves.png').exists()
    # by hand: a mean of 3 of 30 steps is lowest at the 20th
    rows = [dict(find=True, lr=10.0 ** (i / 10 - 3), loss=(i - 20) ** 2 + 0.0) for i in range(30)]
    assert train_module.suggest_lr(rows) == pytest.approx(10 ** -1 / 3)
    assert train_module.suggest_lr(rows[:1]) == pytest.approx(1e-3 / 3)
    # one that comes to its end, and one that breaks
    assert train_here('--lr_schedule=find', '--learning_rate=1e-3', '--max_iters=5')[0]['step'] == 5
    module = script('train', *SMALL, '--lr_schedule=find', '--max_iters=20')
    class Breaking(module.FlatOptimizer):
        def step(self, lr, max_norm=0.0):
            self.g.mul_(math.nan if lr > 1e-4 else 1)
            return super().step(lr, max_norm)
    module.FlatOptimizer = Breaking
    assert module.main()['step'] < 20

def test_the_log_says_when_and_after_how_many_tokens():
    _, log, _ = train_here('--max_iters=6', '--eval_interval=3')
    assert [e['tokens'] for e in log if 'loss' in e] == [8 * 16 * (i + 1) for i in range(6)]
    assert [(e['step'], e['tokens']) for e in log if 'val_loss' in e] == [(3, 3 * 128), (6, 6 * 128)]
    seconds = [e['seconds'] for e in log]
    assert seconds == sorted(seconds) and seconds[0] > 0

def test_diagnostics_are_recorded_with_each_evaluation_and_change_nothing(capsys):
    plain, _, last = train_here('--max_iters=6', '--eval_interval=3', '--out_dir=plain')
    looked, log, same = train_here('--max_iters=6', '--eval_interval=3', '--out_dir=looked', '--diagnostics')
    assert same_weights(last, same)
    found = [e for e in log if 'entropy' in e]
    assert [e['step'] for e in found] == [2, 5]
    assert set(sample_module.SEEN) < set(found[0]) and list(found[0]['weights']) == ['wte', 'h.0', 'h.1'] and list(found[0]['dead']) == ['h.0', 'h.1']
    assert all(sum(shares) == pytest.approx(1, abs=1e-3) for shares in found[1]['activations'].values())
    assert found[1]['updates']['h.0'] < found[0]['updates']['h.0'] < -0.5         # the rate falls
    assert [e['step'] for e in train_here('--max_iters=4', '--eval_interval=100', '--diagnostics')[1] if 'entropy' in e] == [3]
    # gradients of float16 as they are, not as they are scaled
    half = [e for e in train_here('--max_iters=3', '--eval_interval=3', '--diagnostics', '--dtype=float16')[1] if 'entropy' in e][0]
    usual = lambda shares: sum(x * y for x, y in zip(sample_module.LOG_BINS, shares)) / sum(shares)
    assert usual(half['gradients']['h.1']) == pytest.approx(usual(found[0]['gradients']['h.1']), abs=0.3)
    small, large = ((run['run'] / 'curves.png').stat().st_size for run in (plain, looked))
    assert large > 1.5 * small

def test_what_diagnostics_find_is_so():
    model = GPT(tiny(n_kv_head=2, position='none'))
    for w in model.parameters():
        w.data += 0.1 * torch.randn_like(w)
    model.h[0].attn.c_attn.weight.data[:32] = 0             # queries of 0 look at all alike
    model.h[1].mlp.up.weight.data[:16] = 0                  # 16 of 128 units are dead
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    after = {n: p * 1.01 for n, p in before.items()}
    grads = {n: torch.full_like(p, 3e-5) for n, p in before.items()}
    idx, outputs = torch.randint(50, (3, 16)), []
    model.train()
    found = sample_module.diagnose(model, idx, before, grads, after)
    hook = model.h[0].register_forward_hook(lambda module, args, out: outputs.append(out))
    model(idx)
    hook.remove()
    assert model.training and 'attend' not in vars(model.h[0].attn) and not model.h[0]._forward_hooks
    assert found['entropy']['h.0'] == pytest.approx(1, abs=1e-5) and found['entropy']['h.1'] < 0.999
    assert found['dead'] == {'h.0': 0.0, 'h.1': pytest.approx(16 / model.config.d_ff)}
    assert all(x == pytest.approx(-2, abs=1e-3) for x in found['updates'].values())
    assert found['gradients']['h.1'][sample_module.LOG_BINS.index(-4.75)] == pytest.approx(1)       # 3e-5 = 10^-4.52
    counts = Counter((outputs[0].abs().log10() * 4).floor().div(4).flatten().tolist())
    close(torch.tensor(found['activations']['h.0']), torch.tensor([counts[x] / outputs[0].numel() for x in sample_module.LOG_BINS]), 1e-3)
    # attention that sees one token has no entropy: a head looks at the first only
    model.h[1].attn.attend = None
    model.h[1].attn.__dict__.pop('attend')
    with torch.no_grad():
        model.h[1].attn.c_attn.weight *= 1e3
    assert sample_module.diagnose(model, idx, before, grads, after)['entropy']['h.1'] < 0.2

# -----------------------------------------------------------------------------
# sample.py

def test_filtering_keeps_the_likeliest_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    def f(**kw):
        probs, ids = sample_module.filter_logits(logits, **{'temperature': 1.0, **kw})
        return probs[0] if ids is None else torch.zeros(4).scatter(0, ids[0], probs[0])
    close(f(), torch.tensor([0.5, 0.3, 0.15, 0.05]), 1e-6)
    close(f(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), 1e-6)
    close(f(top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]), 1e-6)
    close(f(top_p=0.5), torch.tensor([1.0, 0, 0, 0]), 1e-6)
    close(f(top_p=0.01), torch.tensor([1.0, 0, 0, 0]), 1e-6)        # never nothing
    close(f(temperature=0.5)[0] / f(temperature=0.5)[1], torch.tensor((0.5 / 0.3) ** 2), 1e-5)

@pytest.mark.parametrize('name', ['llama', 'gpt2', 'gqa'])
def test_generation_is_the_same_with_and_without_a_cache_past_the_context(name):
    model = jittered(tiny(**SETTINGS[name]))
    prompt = torch.randint(0, 50, (2, 20)).tolist()         # longer than the context: its end is used
    for options in (dict(temperature=0), dict(temperature=1.0, top_k=5, top_p=0.9)):
        runs = []
        for cache in (True, False):
            runs.append(torch.stack(list(sample_module.generate(model, prompt, 60, seed=1, cache=cache, **options))))
        assert torch.equal(*runs)

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_compiled_generation_gives_the_logits_of_plain_one(dtype):
    if not shutil.which('g++'):
        pytest.skip('no C++ compiler')
    model = jittered(tiny()).to(dtype)
    model.compute_dtype = dtype
    step, prompts = sample_module.compile_step(model, 'cpu'), torch.tensor([[1, 2, 3], [4, 5, 0]])
    with torch.no_grad():
        caches = [model.new_cache(2) for _ in range(2)]
        for cache in caches:
            model(prompts, cache=cache, lengths=torch.tensor([3, 2]))
        for i in range(5):
            a, b = (f(torch.tensor([[i], [7]]), cache=cache)[0] for f, cache in zip((model, step), caches))
            close(a, b, 1e-5 if dtype == torch.float32 else 5e-2)
        assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [8, 7]

@pytest.mark.parametrize('name', ['llama', 'gpt2', 'gqa', 'naive', 'no position'])
def test_prompts_of_different_lengths_in_one_batch_give_what_each_gives_alone(name):
    model = jittered(tiny(**SETTINGS[name]))
    prompts = [torch.randint(0, 50, (n,)).tolist() for n in (1, 5, 16, 11, 30)]
    for options in (dict(temperature=0), dict(temperature=1.0), dict(temperature=0.8, top_k=9), dict(temperature=1.2, top_p=0.8)):
        together = torch.stack(list(sample_module.generate(model, prompts, 40, seed=7, **options)), 1)
        for i, prompt in enumerate(prompts):
            alone = torch.stack(list(sample_module.generate(model, [prompt], 40, seed=7 + i, **options)), 1)
            assert torch.equal(together[i], alone[0])

def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.2, 0.3, 0.0]])
    u = (torch.arange(10_000) + 0.5) / 10_000
    ids = sample_module.draw(probs.expand(10_000, -1), None, u)
    close(torch.bincount(ids, minlength=6) / 10_000, probs[0], 1e-4)
    assert sample_module.draw(probs, None, torch.tensor([1 - 2 ** -24])) == 4       # the largest that torch.rand gives
    assert sample_module.draw(probs, None, torch.tensor([0.0])) == 1
    assert sample_module.draw(probs * math.nan, None, torch.tensor([0.5])) < 6
    assert sample_module.draw(probs[:, 3:], torch.tensor([[7, 8, 9]]), torch.tensor([0.5])) == 8

def test_a_full_context_goes_on_with_its_last_half():
    model, seen = jittered(tiny()), []
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0].tolist()))
    new = [int(x) for x in sample_module.generate(model, [[0] * 10], 9, temperature=0, cache=False)]
    assert [len(s[0]) for s in seen] == [10, 11, 12, 13, 14, 15, 16, 8, 9]
    assert seen[7][0] == ([0] * 10 + new)[9:17]

def test_of_a_long_prompt_the_end_counts():
    model, prompt = jittered(tiny()), [*range(40)]
    new = [[int(x) for x in sample_module.generate(model, [p], 5, temperature=0)] for p in (prompt, prompt[-16:], prompt[:16])]
    assert new[0] == new[1] != new[2]

def test_generation_stops_at_the_stop_token():
    model = jittered(tiny())
    free = [int(x) for x in sample_module.generate(model, [[0]], 30, temperature=0)]
    stop = free[5]
    got = [int(x) for x in sample_module.generate(model, [[0]], 30, temperature=0, stop=stop)]
    assert got == free[:free.index(stop) + 1]

def test_a_stream_never_shows_half_a_character():
    tok = ByteTokenizer()
    stream = sample_module.TextStream(tok)
    shown = [stream(i) for i in tok.encode('aé🙂')]
    assert shown == ['a', '', 'é', '', '', '', '🙂'] and stream.end() == ''
    stream(tok.encode('é')[0])
    assert stream.end() == '\ufffd'
    assert configurator.visible('a\n\x1b[31m\t') == 'a\n\\x1b[31m\t'

def test_samples_come_from_the_newest_run_and_repeat(capsys):
    train_here('--max_iters=3')
    Path('prompt.txt').write_text('def é')
    args = ['--start=FILE:prompt.txt', '--max_new_tokens=30', '--num_samples=3', '--temperature=1.0', '--top_k=50', '--top_p=0.95']
    first, again = script('sample', *args).main(), script('sample', *args).main()
    assert first == again and len(set(first)) == 3 and all(t.startswith('def é') for t in first)
    assert script('sample', *args, '--seed=2').main() != first
    greedy = script('sample', *args, '--temperature=0', '--out_dir=out/corpus').main()
    assert len(set(greedy)) == 1
    assert 'tokens/s' in capsys.readouterr().err

def test_the_table_of_temperatures_counts_how_many_texts_begin_differently(capsys):
    train_here('--max_iters=3', '--out_dir=out/a')
    capsys.readouterr()
    script('sample', '--table', '--num_samples=6', '--start=def', '--max_new_tokens=30').main()
    counts = re.findall(r'temperature (\S+), top_p (\S+): (\d) of 6 begin differently\ndef', capsys.readouterr().out)
    assert [c[:2] for c in counts] == [('0', '1'), ('0.2', '1'), ('1', '1'), ('1', '0.9'), ('2', '1')]
    assert counts[0][2] == '1' and counts[-1][2] == '6'

@pytest.mark.parametrize('args', [['--temperature=1e-6'], ['--temperature=1000'], ['--top_p=1e-300'], ['--top_k=' + '9' * 18], ['--seed=' + '9' * 18], ['--seed=-1']])
def test_settings_at_the_edge_give_text(args, capsys):
    write_checkpoint()
    texts = script('sample', '--out_dir=step_1', '--max_new_tokens=5', '--start=ab', '--temperature=1', *args).main()
    assert len(texts) == 4 and all(t.startswith('ab') for t in texts) and (len(set(texts)) == 1) == (args[0] in ('--temperature=1e-6', '--top_p=1e-300'))

@pytest.mark.parametrize('eos', [None, [], [7], 'x', -1, 2 ** 62, math.nan, {}, True])
def test_any_end_of_text_in_a_config_file_gives_text(eos):
    write_checkpoint(CharTokenizer('abc', special_tokens=['<x>']))
    config = json.loads(Path('step_1/config.json').read_text())
    Path('step_1/config.json').write_text(json.dumps(dict(config, eos_token_id=eos)))
    assert len(script('sample', '--out_dir=step_1', '--max_new_tokens=5').main()) == 4

def write_checkpoint(tok=None, folder='step_1'):
    """A checkpoint without a manifest, of a model that says what comes next at random."""
    tok = tok or CharTokenizer('abc\n ' + STEERING)
    tok.save('t.json')
    model_module.save_checkpoint(folder, GPT(tiny(vocab_size=tok.vocab_size)), 't.json', tok.eot)
    os.remove(f'{folder}/manifest.json')

@pytest.mark.skipif(os.name == 'nt', reason='Windows has no such file names')
def test_no_text_name_or_knob_steers_the_terminal(monkeypatch, capsys):
    def seen(name, *args):
        monkeypatch.setattr(sys, 'argv', [name, *args])
        monkeypatch.setattr(sys.stdout, 'write', sys.stdout.write)      # is put back at the end
        runpy.run_path(str(HERE / f'{name}.py'), run_name='__main__')
        out, err = capsys.readouterr()
        for text in (out, err):
            assert all(c in '\n\t' or c.isprintable() for c in text), text
        return out.count(r'\x1b[31m\x07\x9b2J\u202e'), err.count(r'\x1b[31m\x07\x9b2J\u202e')
    write_checkpoint(folder=f'a{STEERING}')
    assert seen('sample', f'--out_dir=a{STEERING}', f'--start={STEERING}', '--max_new_tokens=200', '--num_samples=2') == (2, 1)
    write_corpus(f'{STEERING}.txt')
    Path('c.py').write_text(f'text_field = {STEERING!r}')
    assert seen('prepare', f'--dataset={STEERING}.txt', '--vocab_size=300', 'c.py', f'--separator=ab{STEERING}')[0] >= 3
    with pytest.raises(SystemExit, match='2'):
        seen('prepare', f'--dataset={STEERING}x')
    assert r'\x1b[31m\x07\x9b2J\u202e' in error_line(capsys.readouterr().err)

# -----------------------------------------------------------------------------
# bench.py

def test_bench_measures_a_step_and_counts_its_flops(capsys):
    bench = script('bench', '--steps=3', '--warmup_steps=1', '--n_embd=64', '--n_layer=2', '--batch_size=4', '--device=cpu')
    Path('tiny.py').write_text("tokenizer = 'char'\nn_embd = 32\nmax_iters = 10 ** 6\n")
    bench.RUNS = [Path('tiny.py')]
    result = bench.main()
    out = capsys.readouterr().out
    assert result['ms'] > 0 and 0 < result['share_of_peak'] < 1.5 and 'of the largest matmul rate measured here' in out
    train = bench.train
    assert result['tokens_per_second'] == pytest.approx(train.batch_size * train.block_size / result['ms'] * 1e3, rel=1e-3)
    # a run as others know it: its own model and steps, not those of this command line
    assert 'here    | tiny, 0M parameters on 1B tokens: about ' in out and 1 < result['minutes']['tiny'] < 10 ** 5

def test_bench_knows_the_vocabulary_of_the_data(capsys):
    write_corpus()
    assert script('bench', '--dataset=corpus.txt', '--tokenizer=byte').build('cpu', 'float32').config.vocab_size == 257
    assert script('bench', '--dataset=corpus.txt', '--vocab_size=300').build('cpu', 'float32').config.vocab_size == 300
    script('prepare', '--dataset=corpus.txt', '--tokenizer=char').main()
    found = json.loads(Path('data/corpus-char/meta.json').read_text())['vocab_size']
    assert script('bench', '--dataset=corpus.txt', '--tokenizer=char').build('cpu', 'float32').config.vocab_size == found != 100
    with pytest.raises(UserError, match='no tokenizer'):
        script('bench', '--tokenizer=gone.json').build('cpu', 'float32')

def test_bench_says_whether_a_device_computes_what_it_should(capsys, monkeypatch):
    bench = script('bench', '--what=check', '--compile=False', '--device=cpu')
    bench.main()
    assert capsys.readouterr().out.count(': pass') == (4 if model_module.choose_dtype('auto', 'cpu')[0] != 'float32' else 2)
    # a device whose clipping goes wrong, as has been seen
    right = bench.train.FlatOptimizer.step
    monkeypatch.setattr(bench.train.FlatOptimizer, 'step', lambda self, lr, max_norm: right(self, lr, max_norm) * 1.1)
    with pytest.raises(UserError, match='wrong on this device'):
        bench.main()
    assert 'gradient norm differs' in capsys.readouterr().out

def test_bench_measures_sampling_and_the_ladder(capsys):
    small = '--n_embd=32', '--n_layer=1', '--block_size=16', '--batch_size=2', '--vocab_size=1100', '--device=cpu', '--compile=False'
    result = script('bench', '--what=sample', '--samples=3', '--new_tokens=10', '--json', *small).main()
    out = capsys.readouterr().out
    assert result['tokens_per_second'] > 0 and '3 x 10 tokens' in out and json.loads(out.splitlines()[-1])['what'] == 'sample'
    bench = script('bench', '--what=ladder', '--steps=2', '--warmup_steps=1', *small)
    bench.main()
    out = capsys.readouterr().out
    assert 'compile                | as asked' in out and 'TF32                   | not on this device' in out
    assert 'captured step          | not on this device' in out
    assert out.count('tokens/s') >= 4 and GPT.pad_to == 64
    for wrong in ('--what=ladder', '--micro_batch_size=4'), ('--what=ladder', '--batch_size=0'), ('--what=sample', '--block_size=1'):
        with pytest.raises(UserError):
            script('bench', *small, *wrong).main()

def test_bench_finds_by_casting_what_each_format_holds_and_what_it_loses(capsys):
    small = '--n_embd=32', '--n_layer=1', '--block_size=32', '--batch_size=16', '--vocab_size=1000', '--device=cpu'
    bench = script('bench', '--what=formats', *small)
    found = bench.main()
    known = dict(fp32=(torch.float32, 8, 23, 2.0 ** 128 - 2.0 ** 104), fp16=(torch.float16, 5, 10, 65504), bf16=(torch.bfloat16, 8, 7, 255 * 2.0 ** 120),
                 E4M3=(torch.float8_e4m3fn, 4, 3, 448), E5M2=(torch.float8_e5m2, 5, 2, 57344))
    for name, (dtype, exponent, fraction, largest) in known.items():
        f, info = found[name], torch.finfo(dtype)
        assert (f['exponent'], f['fraction'], f['largest']) == (exponent, fraction, largest) and f['largest'] == info.max, name
        assert (f['normal'], f['eps'], f['least']) == (info.smallest_normal, info.eps, info.smallest_normal * info.eps), name
        assert info.bits == 1 + exponent + fraction
    out = ' '.join(capsys.readouterr().out.split())
    assert [out.count(size) for size in ('2.42 GB', '1.21 GB', '0.60 GB')] == [1, 2, 2]         # 12,288 x 49,152 times 4, 2 and 1 bytes
    for row in 'fp32 | 1e-08 | 70000 | 1.001 | 0.1', 'fp16 | 0 | inf | 1.001 | 0.099976', 'bf16 | 1.0012e-08 | 70144 | 1 | 0.1001', \
               'E5M2 | 0 | inf | 1 | 0.09375':
        assert f'cast | {row} |' in out
    # numpy casts to float16 too
    model = bench.build('cpu', 'float32')
    model(*bench.RandomTokens(1000).batch(range(16), 32, 'cpu'))[1].backward()
    g = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    half = g[g != 0].astype(np.float16)
    assert found['fp16']['lost'] == pytest.approx([100 * float((half == 0).mean()), 0, 0, 0], abs=1e-3) and found['fp16']['lost'][0] > 0
    assert found['fp32']['lost'] == [0, 0, 0, 0] and found['E4M3']['lost'][0] > found['E5M2']['lost'][0] > found['fp16']['lost'][0]
    assert 0 < found['E4M3']['lost'][2] < found['E4M3']['lost'][0] and found['E4M3']['lost'][3] == pytest.approx(
        100 * float((abs(g[g != 0]) * 65536 >= 432).mean()), abs=1e-3)          # 432 is between 416 and 448

def test_bench_says_where_the_time_goes(capsys):
    bench = script('bench', '--steps=2', '--warmup_steps=1', '--n_embd=32', '--n_layer=1', '--device=cpu', '--profile')
    bench.RUNS = []
    bench.main()
    shares = [float(line.split('|')[1].strip(' %')) for line in capsys.readouterr().out.splitlines() if line.startswith('profile |')]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.1

def test_the_peak_of_a_known_card_is_its_published_one(monkeypatch):
    for name, peak in (('NVIDIA H200', 989e12), ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA GeForce RTX 4090', 165.2e12), ('Other', 0),
                       ('NVIDIA H100 PCIe', 756e12)):
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda place: name)
        assert model_module.peak_flops('cuda:0') == peak

# -- what a model costs

XL = dict(vocab_size=50257, n_layer=48, n_head=25, n_embd=1600, d_ff=6400)

@pytest.mark.parametrize('name', SETTINGS)
def test_parameters_and_flops_by_part_are_what_the_model_has_and_torch_counts(name):
    from torch.utils.flop_counter import FlopCounterMode
    def counted(function):
        with FlopCounterMode(display=False) as mode:
            function()
        return mode.get_total_flops()
    bench, c = script('bench'), tiny(**SETTINGS[name])
    assert sum(bench.parameters(c).values()) == GPT(c).num_params()
    naive, idx, parts = GPT(tiny(**{**SETTINGS[name], 'attention': 'naive'})), torch.randint(50, (3, 16)), bench.forward_flops(c, 16)
    assert (parts['padding'] > 0) == (name == 'padded')
    assert counted(lambda: naive(idx, idx)) == 3 * sum(parts.values())
    assert counted(lambda: naive(idx, idx)[1].backward()) == 3 * bench.training_flops(c, 16)
    if name != 'naive':         # of flash attention torch sees nothing on a CPU
        assert counted(lambda: GPT(c)(idx, idx)) == 3 * (sum(parts.values()) - parts['attention scores, values'])

def test_torch_counts_two_and_a_half_times_the_forward_pass_for_the_backward_pass_of_flash_attention_on_a_gpu():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
    c, shape = tiny(n_layer=1), (1, 4, 16, 8)
    assert sdpa_flop_count(shape, shape, shape) == script('bench').forward_flops(c, 16)['attention scores, values']
    assert sdpa_backward_flop_count(shape, shape, shape, shape) == 2.5 * sdpa_flop_count(shape, shape, shape)

def test_a_linear_net_of_two_layers_costs_2_4_and_6_flops_per_parameter_and_example():
    from torch.utils.flop_counter import FlopCounterMode
    layers = torch.nn.Sequential(model_module.Linear(12, 20), model_module.Linear(20, 7))
    x, per = torch.randn(5, 12, requires_grad=True), 5 * (12 * 20 + 20 * 7)
    with FlopCounterMode(display=False) as forward:
        y = layers(x).sum()
    with FlopCounterMode(display=False) as backward:
        y.backward()
    with FlopCounterMode(display=False) as both:
        layers(x).sum().backward()
    assert [mode.get_total_flops() / per for mode in (forward, backward, both)] == [2, 4, 6]

@pytest.mark.parametrize('type_', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('name', SETTINGS)
def test_the_memory_of_a_step_is_as_predicted(name, type_):
    bench = script('bench')
    for B, change in (2, {}), (3, {}), (3, dict(attention='naive')), (3, dict(dropout=0.1)), (2, dict(dropout=0.1, position='none')), (2, dict(position='none', n_kv_head=2, d_ff=40)):
        c = tiny(**{**SETTINGS[name], 'n_layer': 3, **change})
        model = GPT(c)
        model.compute_dtype = getattr(torch, type_)
        found, guess = bench.measure_memory(model, B, 16, 'cpu'), bench.memory(c, B, 16, type_, 'cpu', muon=True)
        # within 3%: tables, masks and sums of a few numbers are left out, and views that attention keeps of one sequence alone
        assert sum(bench.activations(c, B, 16, type_, 'cpu').values()) == pytest.approx(found['activations'], rel=0.03), (B, change)
        for part, tensors in dict(weights=1, gradients=1, moments=2).items():       # each begins where vectors may
            assert 0 <= found[part] - guess[part] <= 4 * tensors * (4096 + 64 * len(list(model.parameters()))), part

def test_a_block_that_is_computed_again_keeps_its_input():
    bench, c = script('bench'), tiny(n_layer=5)
    one, again = (bench.activations(x, 2, 16, 'float32', recompute=r) for x, r in ((tiny(n_layer=1), False), (c, True)))
    assert sum(again.values()) == sum(one.values()) + 5 * 2 * 16 * 32 * 4 < sum(bench.activations(c, 2, 16, 'float32').values())
    flops = bench.forward_flops(c, 16)
    assert bench.training_flops(c, 16, recompute=True) == 4 * sum(flops.values()) - flops['head']

def test_what_bfloat16_and_flash_attention_keep_on_a_gpu():
    bench, c = script('bench'), tiny()
    naive, flash = (bench.activations(tiny(attention=a), 3, 16, 'bfloat16') for a in ('naive', 'flash'))
    assert naive['scores'] == 2 * (3 * 4 * 16 * 16 * (4 + 2) + 16 * 16) and flash['scores'] == 0
    # the input of the projection, q, k, the matmul's output that v is a view of, flash's output with 4 sums, and it once more in order
    assert flash['attention'] == 2 * 3 * 16 * (2 * 32 * (1 + 1 + 1 + 3 + 1 + 1) + 4 * 4)
    assert naive['head and loss'] == 3 * 16 * (2 * 32 + 4 * 50)
    # two gradients of the logits; of the scores, when the loss is over; that of the head in bfloat16, and once more in float32
    for B, fields, most in (3, {}, 8 * 3 * 16 * 50), (3, dict(vocab_size=20, attention='naive'), 3 * 16 * (8 * 4 * 16 - 4 * 20)), \
            (1, dict(vocab_size=1100), (2 + 4) * 1152 * 32):
        assert bench.memory(tiny(**fields), B, 16, 'bfloat16')['temporary gradients'] == most

def test_the_known_answers_about_gpt2_xl():
    bench = script('bench')
    c, long = GPTConfig(**XL, block_size=1024), GPTConfig(**XL, block_size=16384)
    assert sum(bench.parameters(c).values()) == 2_127_057_600
    (flops, attention), (more, most) = ((sum(f.values()) - f['padding'], f['attention scores, values'])
                                        for f in (bench.forward_flops(c, 1024), bench.forward_flops(long, 16384)))
    assert flops == 4_513_336_524_800 and f'{more:.2e} {more / flops:.0f}' == '1.50e+14 33'
    assert f'{attention / flops:.0%} {most / more:.0%}' == '7% 55%'
    assert bench.largest_batch(GPTConfig(**XL, attention='naive'), 1024, 'float32', 80e9) == 3
    assert int(bench.training_days(3 * flops * 1024 * 400_000, 1, 19.5e12, 0.5)) == 6583
    assert f'{bench.training_days(6 * 70e9 * 15e12, 1024, 989.5e12, 0.5):.1f}' == '143.9'
    assert 4 * 12_288 * 49_152 / 2 ** 30 == 2.25
    assert bench.chinchilla(6 * 70e9 * 1.4e12) == pytest.approx((70e9, 1.4e12))     # Chinchilla itself
    sizes = [dict(zip(('n_layer', 'n_head', 'n_embd'), size), **GPT2) for size in bench.GPT2_SIZES.values()]
    assert [sum(bench.parameters(GPTConfig(**x)).values()) for x in sizes] == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]

def test_the_largest_batch_fits_and_one_more_does_not():
    bench, c = script('bench'), GPTConfig(**GPT2)
    size = lambda B: sum(bench.memory(c, B, 1024, 'bfloat16', recompute=True).values())
    B = bench.largest_batch(c, 1024, 'bfloat16', 10e9, recompute=True)
    assert size(B) <= 10e9 < size(B + 1) and bench.largest_batch(c, 1024, 'bfloat16', 1e9) == 0

def test_the_flops_of_an_optimizer_step_are_those_of_its_operations():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode
    bench, n = script('bench'), 1000
    each = {'mul': 1, 'sub': 1, 'add': 1, 'div': 1, 'sqrt': 1, 'lerp': 3, 'addcmul': 3, 'linalg_vector_norm': 2}

    class Count(TorchDispatchMode):
        flops = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if args[0].numel() == n if torch.is_tensor(args[0]) else False:
                self.flops += n * each[op.overloadpacket.__name__.strip('_')]
            return out
    p, g, m, v = torch.rand(4, n)
    with Count() as count:
        bench.train.adamw(p, g, m, v, 0.1, 0.1, 0.9, 0.9, 0.9, 0.99, 1e-8)
    assert count.flops == bench.ADAMW_FLOPS * n
    w = torch.nn.Parameter(p)
    w.grad = g
    with Count() as count:
        bench.train.clip_grad_norm([w], 0.1)
    assert count.flops == bench.CLIP_FLOPS * n
    for a, b in (24, 40), (40, 24), (32, 32):
        with FlopCounterMode(display=False) as mode:
            bench.train.orthogonalize(torch.randn(1, a, b))
        assert mode.get_total_flops() == bench.newton_schulz_flops(a, b)
    # the matrices of a block are those that Muon has
    for settings in {}, dict(n_kv_head=2), dict(mlp='gelu'):
        hidden = bench.train.FlatOptimizer(GPT(tiny(**settings)), rule='muon').hidden
        ours = Counter(tuple(s) for part in bench.matrices(tiny(**settings)).values() for s in part for _ in range(2))
        assert ours == {tuple(shape): len(found) for shape, found in hidden.items()}

def test_the_page_of_resources_needs_nothing_and_measures_what_it_predicts(capsys):
    result = script('bench', '--what=resources', '--device=cpu', '--vocab_size=5000', '--batch_size=2', '--json').main()
    out = capsys.readouterr().out
    *page, last = out.splitlines()
    assert len(page) <= 50 and max(map(len, page)) <= 150 and not list(Path().iterdir())
    assert json.loads(last)['training'] == result['training'] > 0
    assert sum(result['predicted'].values()) == pytest.approx(sum(result['measured'].values()), rel=0.01)
    assert 'padding' in out and '\nXL, 16,384 tokens' in out and '1 x 80 GB hold 5B parameters' in out
    shares = [float(x) for line in page for x in re.findall(r'([0-9.]+)%', line) if line.split('|')[0].strip() in result['forward']]
    assert sum(shares) == pytest.approx(200 - 100 * (5000 * 256 + 1536) / sum(result['parameters'].values()), abs=0.5)

def test_the_page_of_resources_builds_nothing_that_takes_much_memory(capsys, monkeypatch):
    bench = script('bench', '--what=resources', '--device=cpu', '--n_layer=1', '--n_embd=8192', '--vocab_size=200000', '--block_size=8')
    monkeypatch.setattr(bench, 'build', None)
    assert bench.main()['measured'] == {} and 'measured on cpu          | one sequence would take too much' in capsys.readouterr().out

def test_the_page_of_resources_is_instant_for_a_model_that_fits_nowhere(capsys):
    args = '--n_layer=80', '--n_head=64', '--n_kv_head=8', '--n_embd=8192', '--d_ff=28672', '--block_size=4096', '--tie_weights=False', '--qk_norm=False'
    args += '--tokenizer=bpe', '--vocab_size=128256', '--device=cpu', '--num_gpus=8', '--tokens=15e12', '--flop_budget=1.2e20', '--memory_gb=80', '--mfu=0.5'
    result = script('bench', '--what=resources', *args).main()
    out = capsys.readouterr().out
    assert sum(result['parameters'].values()) == 70_553_706_496         # Llama 3 70B
    assert '8 x 80 GB hold 40B parameters' in out and 'for 1.5e+13 tokens' in out and 'would take too much memory' in out
    assert '0 (naive); 0 (flash); 0 (flash, blocks twice)' in out and 'for 1e+09 parameters on 2e+10 tokens' in out
    days = sum(result['forward'].values()) * 3 / 4096 * 15e12 / (8 * 989.5e12 * 0.5) / 86400
    assert f'time                     | {days:.1f} days' in out
    for wrong in '--mfu=0', '--mfu=1.5', '--num_gpus=0', '--memory_gb=-1', '--tokens=-1', '--peak_tflops=0', '--flop_budget=nan', '--batch_size=0':
        with pytest.raises(UserError):
            script('bench', '--what=resources', wrong).main()

LAB = ['--what=compare', *SMALL, '--optimizer=adamw', '--max_iters=6', '--eval_interval=100', '--seeds=2']

def test_an_experiment_trains_every_arm_with_every_seed_and_ends_with_a_table_and_a_picture(capsys):
    write_corpus()
    Path('small.py').write_text('n_embd = 16\n')
    args = *LAB, '--arms=as it is: ; slow: --learning_rate=1e-4\nsmall one: small.py --n_layer=1', '--out_dir=out/lab', '--seed=3'
    bench = script('bench', *args)
    runs = bench.main()['runs']
    out = capsys.readouterr().out
    assert [p.name for p in sorted(Path('out/lab').iterdir())] == [
        'as_it_is-3', 'as_it_is-4', 'curves.png', 'slow-3', 'slow-4', 'small_one-3', 'small_one-4']
    assert json.loads((model_module.checkpoints('out/lab/small_one-4')[-1] / 'config.json').read_text())['hidden_size'] == 16
    # each is what train.py alone makes of it
    alone, _, _ = train_here('--optimizer=adamw', '--max_iters=6', '--eval_interval=100', '--seed=4', '--learning_rate=1e-4', '--out_dir=alone')
    assert runs['slow'][1] == alone['val_loss'] != runs['slow'][0]
    mean, spread = sum(runs['slow']) / 2, abs(runs['slow'][0] - runs['slow'][1]) / 2 ** 0.5
    assert f'| slow | {mean:.4f} ± {spread:.4f} | {mean - sum(runs["as it is"]) / 2:+.4f} |' in out
    assert 'step 6 | loss' not in out and 'step 6 | loss' in Path('out/lab/slow-3/output.txt').read_text()
    # again: nothing is trained
    def never(*args):
        raise AssertionError
    again = script('bench', *args)
    again.train.find_speed = never
    assert again.main()['runs'] == runs
    with pytest.raises(UserError, match='other knobs'):
        script('bench', *args, '--weight_decay=0').main()

def test_an_arm_that_diverges_is_said_and_the_others_go_on(capsys):
    write_corpus()
    bench = script('bench', *LAB, '--arms=well:; ill: --learning_rate=1e38 --grad_clip=0 --optimizer=sgd')
    runs = bench.main()['runs']
    assert runs['ill'] == [math.inf] * 2 and all(x < 6 for x in runs['well'])
    assert '| ill | inf (2 of 2 diverged)' in capsys.readouterr().out
    assert 'diverged: ' in Path('out/compare/ill-1/output.txt').read_text()
    for wrong in '', '--n_embd=16; --n_embd=32', 'a b:; a_b:', 'same:; same: --seed=2':
        with pytest.raises(UserError, match='names of their own'):
            script('bench', '--what=compare', f'--arms={wrong}').main()
    with pytest.raises(UserError, match='can not be compared'):
        script('bench', *LAB, '--arms=a: --lr_schedule=find', '--out_dir=out/other').main()
    with pytest.raises(UserError, match='belong into arms'):
        script('bench', str(HERE / 'config' / 'broken_no_mask.py'), *LAB, '--arms=a:; b: --seed=2').main()
    mock.patch.stopall()
    with pytest.raises(UserError, match='did you mean n_embd'):
        script('bench', *LAB, '--arms=a: --n_emb=3').main()

def test_numbers_that_are_not_finite_spoil_neither_table_nor_law_nor_suggestion(capsys):
    bench = script('bench')
    line = lambda step, loss: dict(step=step, tokens=step, loss=loss, tokens_per_second=5.0, mfu=None)
    end = lambda loss, bpb: dict(step=4, tokens=4, val_loss=loss, val_bpb=bpb)
    well, ill = [line(0, 3.0), line(2, 2.0), line(3, 1.9), end(1.5, 0.75)], [line(0, 3.0), line(2, math.nan), line(3, math.inf)]
    bench.print_table(dict(mixed=[[*ill, dict(step=4, val_loss=math.inf, val_bpb=math.inf)], well, well], unfinished=[well[:3]]))
    out = capsys.readouterr().out
    assert '| mixed | 1.5000 ± 0.0000 (1 of 3 diverged) | +0.0000 | 0.750 | 4 | 4 |' in out and '| unfinished | nan | +nan |' in out
    train_module.draw_curves(dict(well=well, ill=ill), Path('curves.png'))      # as they come, with a sign that is no formula
    train_module.draw_curves({'a $x^$': well, 'b': well}, Path('curves.png'))
    rows = [dict(find=True, lr=10.0 ** (i / 10 - 3), loss=(i - 20) ** 2 + 0.0 if i < 29 else math.nan) for i in range(30)]
    assert train_module.suggest_lr(rows) == pytest.approx(10 ** -1 / 3)

def test_the_picture_of_an_experiment_has_every_end_though_seeds_have_different_lengths(monkeypatch):
    write_corpus()
    bench = script('bench', *LAB, '--arms=a:; b: --n_layer=1')
    drawn, lengths = [], iter((6, 4, 5, 3))
    def run_arm(args, folder, seed):
        n = next(lengths)
        return bench.config, [*(dict(step=i, loss=1.0 * n) for i in range(n)), dict(step=n, val_loss=2.0 * n, val_bpb=1.0)]
    bench.run_arm, bench.train.draw_curves = run_arm, lambda logs, path: drawn.append(logs)
    bench.main()
    assert {name: [e['val_loss'] for e in log if 'val_loss' in e] for name, log in drawn[0].items()} == dict(a=[11.0], b=[7.0])
    assert [e['loss'] for e in drawn[0]['b'] if 'loss' in e] == [3.5] * 3

@pytest.mark.parametrize('fault, sign', [
    ('no_zero_grad', lambda broken, right: broken['norm'][-1] > 3 * right['norm'][-1]),
    ('constant_embedding', lambda broken, right: broken['spread'] == 0 < right['spread']),
    ('no_mask', lambda broken, right: broken['sees_the_future'] and not right['sees_the_future']),
    ('no_shift', lambda broken, right: broken['loss'][-1] < right['loss'][-1] - 0.05),
    ('no_scale', lambda broken, right: broken['scale'] == 1 and right['scale'] == 65536),
])
def test_every_fault_of_the_museum_breaks_the_real_code_and_is_gone_after_its_run(fault, sign, monkeypatch):
    write_corpus()
    bench = script('bench', *LAB, '--seeds=1', '--max_iters=20', '--learning_rate=1e-2', '--tie_weights=False', '--norm_position=post')
    monkeypatch.setitem(sys.modules, 'train', bench.train)
    seen = {}
    class Watched(bench.train.FlatOptimizer):
        def __init__(self, model, *args, **kw):
            seen['spread'] = float(model.wte.weight.detach().std())
            super().__init__(model, *args, **kw)
        def step(self, lr, max_norm=0.0):
            seen['scale'] = float(self.loss_scale)
            return super().step(lr, max_norm)
    right_peek = bench.train.evaluate
    def evaluate(model, *args):
        idx = torch.randint(300, (1, 16), generator=torch.Generator().manual_seed(1))
        seen.update(sees_the_future=not torch.allclose(
            model(idx)[0][:, :8], model(torch.cat((idx[:, :8], idx[:, 8:].flip(1)), 1))[0][:, :8], atol=1e-5))
        return right_peek(model, *args)
    monkeypatch.setattr(bench.train, 'evaluate', evaluate)
    monkeypatch.setattr(bench.train, 'FlatOptimizer', Watched)
    def run(name, *args):
        log = bench.run_arm([*args, *(['--dtype=float16'] if fault == 'no_scale' else [])], Path(name), 1)[1]
        return dict(seen, loss=losses(log), norm=[e['grad_norm'] for e in log if 'grad_norm' in e], log=log)
    broken, right = run('broken', str(HERE / 'config' / f'broken_{fault}.py')), run('right')
    assert sign(broken, right)
    again = run('again')
    assert again['loss'] == right['loss'] and again['norm'] == right['norm']

def test_curves_of_several_runs_are_one_table_and_one_picture(capsys):
    a, b = (train_here('--max_iters=4', f'--seed={seed}', f'--out_dir=out/run{seed}')[0] for seed in (1, 2))
    capsys.readouterr()
    script('bench', '--what=curves', '--runs=out/run1,out/run2').main()
    out = capsys.readouterr().out
    assert f'| run1 | {a["val_loss"]:.4f} | +0.0000 |' in out and f'| run2 | {b["val_loss"]:.4f} | {b["val_loss"] - a["val_loss"]:+.4f} |' in out
    assert Path('out/curves.png').read_bytes()[:4] == b'\x89PNG'
    os.makedirs('other')
    shutil.copytree('out/run1', 'other/run1')
    script('bench', '--what=curves', '--runs=out/run1, other/run1').main()
    assert '| out/run1 |' in (out := capsys.readouterr().out) and '| other/run1 |' in out
    for wrong in '', 'out/run1,gone':
        with pytest.raises(UserError, match='give folders'):
            script('bench', '--what=curves', f'--runs={wrong}').main()

def test_the_toy_of_the_course_falls_faster_with_a_higher_rate_until_it_diverges(capsys):
    bench = script('bench', '--what=toy')
    bench.main()
    row = next(line for line in capsys.readouterr().out.splitlines() if ' sgd ' in line).split('|')[2:]
    after = dict(zip(bench.TOY_RATES, [float(cell.split()[0]) for cell in row]))
    # by hand: each step multiplies the weights by 1 - rate / sqrt(t + 1) * 2 / 100
    torch.manual_seed(1)
    start = float((5 * torch.randn(10, 10)).pow(2).mean())
    for rate in 1e1, 1e2, 1e3:
        assert after[rate] == pytest.approx(start * math.prod((1 - rate / (t + 1) ** 0.5 / 50) ** 2 for t in range(10)), rel=0.1)
    assert start > after[1e1] > after[1e2] and after[1e3] > start

def test_a_law_of_scaling_is_found_again(capsys):
    N, D = torch.meshgrid(torch.logspace(4, 6, 4), torch.logspace(5, 7, 4), indexing='ij')
    points = [(float(n), float(d), 1.7 + 400 / float(n) ** 0.5 + 900 / float(d) ** 0.45) for n, d in zip(N.flatten(), D.flatten())]
    Path('out').mkdir()
    script('bench').fit_law(points, Path('out'))
    numbers = [float(x) for x in re.findall(r'-?[\d.]+(?:e[+-]\d+)?', capsys.readouterr().out.split('=')[1])][:6]
    assert numbers == pytest.approx([1.7, 400, 0.5, 900, 0.45, 0.0], rel=0.03, abs=0.1) and Path('out/law.png').exists()

# -----------------------------------------------------------------------------
# end to end, in processes of their own

@pytest.mark.parametrize('ends, status, says', [('sys.exit(143)', 143, ''), ("raise configurator.UserError('a line')", 2, 'error: a line\n'),
                                                ('1 / 0', 1, 'Traceback'), ('0', 0, '')])
def test_the_end_of_one_process_of_several_keeps_its_status_and_its_last_words(ends, status, says):
    code = f"import sys, configurator\ndef main():\n    print('last words')\n    {ends}\nconfigurator.launch(main)"
    for env in {}, dict(RANK='1'):
        done = launch('-c', code, check=status, PYTHONPATH=str(HERE), PYTHONUNBUFFERED='', **env)
        assert done.stdout == 'last words\n' and done.stderr.startswith(says)

def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does(monkeypatch):
    module = script('train', '--batch_size=10')
    with pytest.raises(UserError, match='take 8 or 12'):
        module.check_batch(4)
    with pytest.raises(UserError, match=r'\[2, 5\]|\[5, 2\]'):
        script('train', '--batch_size=10', '--micro_batch_size=4').check_batch(1)
    script('train', '--batch_size=12', '--micro_batch_size=3').check_batch(2)

NASTY = ['', ' ', 'nan', 'inf', '-inf', '-1', '0', '1', '2', '1e400', '1e-300', '1e300', '9' * 20, '9' * 400, '-' + '9' * 20, '0x10', '1_000', '٣', STEERING, '\0', '\udcff',
         '../..', 'x' * 10 ** 5, 'None', 'True', '[1]', 'meta', 'cuda:9', 'mps', 'auto', '.', '~', '%s', '{}', 'corpus.txt', 'a\nb', str(10 ** 9), str(10 ** 12), str(2 ** 62)]
ODD = ['--', '--=', '--seed', '--seed=', '=5', '--knob==', '---seed=1', '-seed=1', '--seed =1', '', ' ', '-', 'corpus.txt', '.', 'config', 'missing.py',
       'folder.py', 'latin.py', '--seed=1=2', '--__name__=x', '--KINDS=1', STEERING, f'--{STEERING}=1', f'{STEERING}.py', '--\udcff=1', 'x' * 10 ** 5, '--' + 'x' * 10 ** 5]
BODIES = ['a b', 'def f(): f()\nf()', 'import sys\nsys.exit()', 'raise ValueError("\x1b[31m")', '1 / 0', 'raise GeneratorExit', '(' * 10 ** 4, 'x' * 10 ** 5, 'import missing',
          'seed = seed', 'del seed', '_seed = 1', 'import math', 'seed = "1"', f'raise ValueError({STEERING!r} * 999)', '\0', 'if', '\t\tseed = 1', 'open("missing")', 'assert 0']
VALUES = ['None', '[1]', '{}', 'float("nan")', '-float("inf")', '10 ** 30', '10 ** 400', '-1', '0', '1', '1.5', 'True', '"auto"', r'"\x1b"', r'"\0"', r'"\ud800"', 'b"x"', '1j', '"x" * 10 ** 5',
          '__import__("numpy").float64(1)', '__import__("numpy").int64(3)', 'lambda: 1', 'object()', '__import__("os")', 'range(3)', '2 ** 62', 'print', 'int']

def nasty_arguments(rng, knobs):
    """One to three arguments that a person should not give. They may be right by chance."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind, knob = rng.random(), rng.choice(knobs)
        if kind < 0.6:
            yield f'--{knob}={rng.choice(NASTY)}'
        elif kind < 0.7:
            yield rng.choice(ODD)
        else:
            Path('nasty.py').write_text(rng.choice(BODIES) if kind < 0.8 else f'{knob} = {rng.choice(VALUES)}', encoding='utf-8')
            yield 'nasty.py'

@pytest.fixture
def nasty_folder():
    write_corpus()
    write_checkpoint()
    Path('folder.py').mkdir()
    Path('latin.py').write_bytes(b'seed = "\xff"')
    script('prepare', '--dataset=corpus.txt', '--vocab_size=300').main()
    return dict(train=SMALL, sample=['--out_dir=step_1'], prepare=['--dataset=corpus.txt', '--vocab_size=300'], bench=SMALL)

def quietly(name, args, monkeypatch):
    """A script in this process, up to where its work would begin."""
    module = script(name, *args)
    monkeypatch.setattr(prepare_module, 'fetch', started)
    for place in (module, vars(module).get('train'), vars(module).get('sample')):
        for work in 'find_speed', 'generate', 'fetch', 'measure', 'bench_check':
            if hasattr(place, work):
                monkeypatch.setattr(place, work, started)
    module.main()

OUT_OF_RANGE = [
    ('train', ['--seed=-1'], 'seed'), ('train', ['--device=meta'], 'device'), ('train', ['--device=mps'], 'Apple'), ('train', ['--n_embd=1000000000'], 'n_embd'),
    ('train', ['--adam_eps=-1'], 'adam_eps'), ('train', ['--learning_rate=1e299'], 'learning_rate'), ('train', ['--rope_theta=0'], 'rope_theta'),
    ('train', ['--batch_size=1000000000000'], 'batch_size'), ('train', ['--n_layer=1000000000'], 'n_layer'), ('train', ['--n_head=0'], 'n_head'),
    ('train', ['--sample_tokens=1000000000000'], 'sample_tokens'), ('train', ['--block_size=1000000000'], 'block_size'), ('train', ['--norm_eps=-1'], 'norm_eps'),
    ('sample', ['--device=meta'], 'device'), ('sample', ['--temperature=1e-300'], 'temperature'), ('sample', ['--temperature=1e299'], 'temperature'),
    ('sample', ['--num_samples=1000000000000'], 'num_samples'), ('sample', ['--max_new_tokens=1000000000000'], 'max_new_tokens'), ('sample', ['--top_p=0'], 'top_p'),
    ('prepare', ['--workers=1000000000000'], 'workers'), ('prepare', ['--workers=-1'], 'workers'), ('bench', ['--what=sample', '--samples=1000000000'], 'samples'),
    ('bench', ['--what=sample', '--device=meta'], 'device'), ('bench', ['--adam_eps=-1'], 'adam_eps'), ('bench', ['--what=sample', '--n_layer=1000000000'], 'n_layer'),
]

def test_a_knob_out_of_its_range_is_refused_by_name(nasty_folder, monkeypatch):
    for name, args, says in OUT_OF_RANGE:
        with pytest.raises(UserError, match=says):
            quietly(name, [*nasty_folder[name], *args], monkeypatch)

@pytest.mark.parametrize('name', ['train', 'sample', 'prepare', 'bench'])
def test_nasty_arguments_and_config_files_are_one_line_and_status_2_or_right(name, nasty_folder, monkeypatch, capsys):
    rng, knobs, refused = random.Random(name), [*script(name).config], 0
    with at_most(4000):
        for _ in range(400 if LONG else 30):
            args = [*nasty_folder[name], *nasty_arguments(rng, knobs)]
            capsys.readouterr()
            try:
                configurator.launch(lambda: quietly(name, args, monkeypatch))
            except Started:
                continue
            except SystemExit as e:
                assert e.code == 2, args
                error_line(capsys.readouterr().err)
                refused += 1
            except BaseException as e:
                raise AssertionError(args) from e
    assert refused

@pytest.mark.parametrize('i', range(20 if LONG else 2))
def test_nasty_arguments_are_one_line_with_and_without_asserts(i, nasty_folder):
    name, args = [('train', ['--n_embd=200000000', '--n_head=1000000']), ('prepare', ['--workers=' + '9' * 20]), ('sample', ['--device=meta']),
                  ('bench', ['--n_embd=200000000', '--n_head=1000000']), ('train', ['--seed=' + '9' * 20]), ('sample', ['--temperature=1e-300']), ('prepare', ['--']),
                  ('bench', ['--what=sample', '--rope_theta=-1']), ('train', ['latin.py']), ('sample', ['--num_samples=' + '9' * 12])][i % 10]
    flags = ['-O'] if (i + i // 10) % 2 == 0 else []
    one_line(launch(*flags, HERE / f'{name}.py', *nasty_folder[name], *args))

# -----------------------------------------------------------------------------
# nothing lost: what happens to a run

def start(function, *args, **env):
    """Calls a function in a fork of this process, with its output in a file. -> its pid"""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ.update(env)
            out = os.open(f'{os.getpid()}.out', os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = (os.fdopen(fd, 'w', buffering=1, closefd=False) for fd in (1, 2))
            for s, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(s, default)
            configurator.launch(lambda: function(*args))
            status = 0
        except SystemExit as e:
            status = e.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    STARTED.append(pid)
    return pid

def end(pid, seconds=60):
    """-> (the exit status of a process, 128 + n if it was killed; what it said); it fails where it does not come to an end"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            STARTED.remove(pid)
            return (128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)), Path(f'{pid}.out').read_text(errors='replace')
        time.sleep(0.005)
    pytest.fail(f'it did not end in {seconds} s: ' + Path(f'{pid}.out').read_text(errors='replace')[-3000:])

def train_with(*args, change=lambda module: None):
    """What start() is to do: train.py with these arguments, its module changed before."""
    module = script('train', *SMALL, *args)
    module.draw_curves = lambda logs, path: None       # it takes longer than these runs
    change(module)
    module.main()

def port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def start_ranks(n, *args, change=lambda module: None, **env):
    """n processes that train together, each in a fork. -> their pids"""
    env = dict(WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port()), **env)
    return [start(functools.partial(train_with, change=change), *args, RANK=str(r), LOCAL_RANK=str(r), **env) for r in range(n)]

def prepared_corpus():
    """The data folder of train_here, so that many runs need not make it again."""
    write_corpus()
    script('prepare', '--dataset=corpus.txt', '--vocab_size=300').main()

def wait_for(path, what, pid):
    """Waits until a file has some lines, or some text."""
    while not (path.exists() and (what in path.read_text() if isinstance(what, str) else path.read_text().count('\n') >= what)):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), Path(f'{pid}.out').read_text()
        time.sleep(0.002)

OTHER_CHOICES = dict(choose_dtype=lambda dtype, place: ('bfloat16', 'another machine'), estimate=lambda *args: 1e6)
KILLED = ['--max_iters=50', '--eval_interval=5', '--sample_tokens=0', '--dropout=0.1', '--micro_batch_size=4', '--dataset=data/corpus-bpe300',
          '--block_size=128', '--eval_tokens=128', '--init_from=auto', '--dtype=auto', '--compile=auto']

def test_a_run_killed_at_any_moment_ends_with_the_weights_of_one_that_was_not():
    prepared_corpus()
    assert prepare_module.read_meta(Path('data/corpus-bpe300'))['train']['tokens'] < 50 * 8 * 128      # an epoch ends
    first_dtype = lambda module: setattr(module, 'choose_dtype', lambda dtype, place: ('float32', 'this machine'))
    second = lambda module: [setattr(module, k, v) for k, v in OTHER_CHOICES.items()]
    t = time.monotonic()
    assert end(start(functools.partial(train_with, change=first_dtype), *KILLED, '--out_dir=a'))[0] == 0
    seconds, rng = time.monotonic() - t, random.Random(1)
    straight, moments = model_module.checkpoints('a')[-1], []
    for i in range(80 if LONG else 3):
        pid = start(functools.partial(train_with, change=first_dtype), *KILLED, '--out_dir=b')
        time.sleep(rng.uniform(0.1, 1) * seconds)
        os.kill(pid, signal.SIGKILL)
        end(pid)
        moments.append([p.name for p in model_module.checkpoints('b')])
        status, said = end(start(functools.partial(train_with, change=second if moments[-1] else first_dtype), *KILLED, '--out_dir=b'))
        assert status == 0 and same_weights(straight, model_module.checkpoints('b')[-1]), said
        assert losses(train_module.read_log(Path('b/log.jsonl'))) == losses(train_module.read_log(Path('a/log.jsonl')))
        assert not list(Path('b').glob('.step*'))
        shutil.rmtree('b')
    assert len(set(map(tuple, moments))) > (8 if LONG else 1)       # before the first checkpoint, between others

def check_processes_killed(compiled):
    prepared_corpus()
    args = [HERE / 'train.py', *SMALL, *KILLED, f'--compile={compiled}']
    if compiled:
        launch(*args, '--out_dir=warm', check=0)
    t = time.monotonic()
    launch(*args, '--out_dir=a', check=0)
    seconds, rng = time.monotonic() - t, random.Random(1)
    for i in range(10):
        process = subprocess.Popen([sys.executable, *map(str, args), '--out_dir=b'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env=dict(os.environ, OMP_NUM_THREADS='1'))
        time.sleep(rng.uniform(0.3, 1) * seconds)
        process.kill()
        process.wait()
        launch(*args, '--out_dir=b', check=0)
        assert same_weights(model_module.checkpoints('a')[-1], model_module.checkpoints('b')[-1])
        shutil.rmtree('b')

if LONG:
    test_processes_killed_at_any_moment_compiled_and_not = pytest.mark.parametrize('compiled', [False, True])(check_processes_killed)

def run_with_two_checkpoints(*args):
    """A run in the folder a with checkpoints of steps 5 and 10. -> the older, the newer"""
    train_here('--max_iters=10', '--eval_interval=5', '--sample_tokens=0', '--out_dir=a', *args)
    assert [p.name for p in model_module.checkpoints('a')] == ['step_00000005', 'step_00000010']
    return model_module.checkpoints('a')

def crash_at(n):
    """Ends this process at the n-th time that it asks the system to change something: open, sync, make, rename, remove."""
    count, real = itertools.count(), os.fsync
    hit = lambda: next(count) == n and os._exit(99)
    os.fsync = lambda fd: (hit(), real(fd), hit())
    events = ('open', 'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.chmod', 'shutil.copyfile')
    sys.addaudithook(lambda event, args: event in events and ('step_' in str(args[0]) or str(args[0]).endswith('.json')) and hit())

def test_a_crash_at_any_point_of_a_save_leaves_the_old_checkpoint_or_the_new_one():
    run_with_two_checkpoints()
    shutil.copytree('a', 'whole')
    shutil.rmtree('a/step_00000010')
    module = script('train', 'a/config.py', '--init_from=resume', '--keep_checkpoints=1', f'--dataset={Path("data/corpus-bpe300").resolve()}')
    save, seen, sizes = module.save, Counter(), [0, 500, *range(1000, 600000, 30000 if LONG else 150000)]
    def child(folder, point, size, *args):
        os.chdir(folder)
        if size:        # a write beyond it kills: in the middle of a file
            import resource
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        crash_at(point)
        save(*args)
    def crashing(run, *args):
        points = itertools.takewhile(lambda point: not seen[0], itertools.count(0, 1 if LONG else 3))
        for point in itertools.chain(points, (-size for size in sizes[1:])):
            folder = Path(f'crash{point}')
            shutil.copytree(run, folder / run)
            status, said = end(start(child, folder, point, max(-point, 0), run, *args))
            left = model_module.newest_whole(folder / run)
            assert status in (0, 99, 128 + signal.SIGXFSZ) and same_weights(left, Path('whole') / left.name), said
            model_module.load_model(left)
            seen[status] += 1
            seen[left.name] += 1
            shutil.rmtree(folder)
        return save(run, *args)
    module.save, module.draw_curves = crashing, lambda logs, path: None
    module.main()
    assert seen[99] > (60 if LONG else 20) and seen['step_00000005'] > seen['step_00000010'] > 3 and seen[128 + signal.SIGXFSZ] > 2
    assert [p.name for p in model_module.checkpoints('a')][-1] == 'step_00000010' and not list(Path('a').glob('.step*'))

def test_files_are_on_the_disk_before_they_get_their_name_and_the_name_after(monkeypatch):
    events, paths, open_, fsync, rename, replace = [], {}, os.open, os.fsync, os.rename, os.replace
    def opened(path, *args, **kwargs):
        fd = open_(path, *args, **kwargs)
        paths[fd] = Path(path)
        return fd
    monkeypatch.setattr(os, 'open', opened)
    monkeypatch.setattr(os, 'fsync', lambda fd: (events.append(('sync', paths[fd])), fsync(fd))[1])
    monkeypatch.setattr(os, 'rename', lambda a, b: (events.append(('name', Path(a), Path(b))), rename(a, b))[1])
    monkeypatch.setattr(os, 'replace', lambda a, b: (events.append(('name', Path(a), Path(b))), replace(a, b))[1])
    folder = Path('run/step_00000001').resolve()
    Path('tok.json').write_text('{}')
    model_module.save_checkpoint(folder, GPT(tiny()), 'tok.json', None, dict(step=1), dict(x=torch.ones(3)))
    partial = folder.with_name('.step_00000001.partial')
    named = events.index(('name', partial, folder))
    assert {e[1] for e in events[:named]} == {partial, *(partial / p.name for p in folder.iterdir())} and len(list(folder.iterdir())) == 8
    assert events[named - 1] == ('sync', partial) and events[named + 1:] == [('sync', folder.parent)]
    events.clear()
    configurator.write_whole(folder / 'note', 'text')
    assert events == [('sync', folder / '.note.partial'), ('name', folder / '.note.partial', folder / 'note'), ('sync', folder)]
    assert (folder / 'note').read_text() == 'text' and not (folder / '.note.partial').exists()

def damaged(folder, kind, rng):
    """Damages one file of a folder, larger ones more often. -> its name and what mends it"""
    files = sorted(folder.iterdir())
    path = rng.choices(files, [p.stat().st_size for p in files])[0] if rng.random() < 0.5 else rng.choice(files)
    before, data = path.read_bytes(), bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if kind == 'bit':
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 'page':
        data[at // 4096 * 4096:at // 4096 * 4096 + 4096] = bytes(min(4096, len(data) - at // 4096 * 4096))
    elif kind == 'cut':
        del data[at:]
    elif kind == 'byte':
        data.append(rng.choice(b'\n \0x'))
    elif kind == 'other':
        data = (folder.with_name('step_00000005') / path.name).read_bytes()
    path.write_bytes(data)
    return path, before

def test_every_damage_to_a_checkpoint_is_named_and_the_older_one_is_offered_and_taken(capsys):
    older, newer = run_with_two_checkpoints()
    rng, counts = random.Random(2), dict(bit=2000, page=500, cut=500, byte=100, other=100) if LONG else dict(bit=60, page=20, cut=20, byte=10, other=10)
    for kind, count in counts.items():
        tried = 0
        while tried < count:
            path, before = damaged(newer, kind, rng)
            if path.read_bytes() != before:
                said, tried = [], tried + 1
                assert model_module.newest_whole('a', said.append) == older
                assert len(said) == 1 and isinstance(said[0], str) and '\n' not in said[0]
                assert str(path) in said[0] or path.name == 'manifest.json' and str(newer) in said[0], said
                if tried <= count / 10:
                    with pytest.raises(UserError, match=re.escape(f'use {older}')):
                        model_module.load_model(newer)
            path.write_bytes(before)
    for name in sorted(p.name for p in newer.iterdir()):        # a file that is gone, or one too many
        os.rename(newer / name, 'aside')
        assert model_module.newest_whole('a') == older
        os.rename('aside', newer / name)
    for more in b' ', b'\n', b'\r\n':
        before = (newer / 'manifest.json').read_bytes()
        (newer / 'manifest.json').write_bytes(before + more)
        assert model_module.newest_whole('a') == older
        (newer / 'manifest.json').write_bytes(before)
    for name in 'model-00002-of-00002.safetensors', 'x.safetensors':
        shutil.copyfile(older / 'model.safetensors', newer / name)
        assert model_module.newest_whole('a') == older
        os.remove(newer / name)
    assert model_module.newest_whole('a') == newer
    shutil.copytree('a', 'whole')
    for kind in ('bit', 'page', 'cut', 'byte', 'other') * (2 if LONG else 1):
        while (last := damaged(newer, kind, rng))[0].read_bytes() == last[1]:
            pass
        line = one_line(launch(HERE / 'sample.py', f'--out_dir={newer}', '--device=cpu')) if LONG or kind == 'bit' else ''
        assert not line or f'use {older}' in line
        done = launch(HERE / 'train.py', 'a/config.py', '--init_from=resume', check=0) if LONG or kind == 'cut' else None
        if done:
            assert f'{newer}' in done.stdout and f'resumed {older}' in done.stdout
            assert same_weights(newer, Path('whole') / newer.name) and len(list(Path('a').glob('damaged_*'))) == 1
            shutil.rmtree('a')
            shutil.copytree('whole', 'a')
        last[0].write_bytes(last[1])
    for folder in older, newer:
        damaged(folder, 'byte', rng)
    assert 'no checkpoint in a is whole' in one_line(launch(HERE / 'train.py', 'a/config.py', '--init_from=resume'))

def limited(size, *args):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train_with(*args)

def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half_written():
    _, straight, a = train_here('--max_iters=15', '--eval_interval=5', '--sample_tokens=0', '--out_dir=a')
    train_here('--max_iters=5', '--lr_decay_iters=15', '--sample_tokens=0', '--out_dir=b')
    args = ['--max_iters=15', '--eval_interval=5', '--sample_tokens=0', '--out_dir=b', '--init_from=resume']
    shutil.copytree('b', 'old')
    largest = max(p.stat().st_size for p in Path('b/step_00000005').iterdir())
    for size in range(8000, largest, largest // (20 if LONG else 4)):
        status, said = end(start(limited, size, *args))
        assert status == 2 and 'the disk is full' in said.splitlines()[-1] and 'Traceback' not in said, said
        assert same_weights(model_module.newest_whole('b'), Path('old/step_00000005')) and [p.name for p in model_module.checkpoints('b')] == ['step_00000005']
        assert not [p for p in Path('b').rglob('*partial*')]
        assert size < 20000 or 'step 10 is not saved: the disk is full; training goes on' in said and 'step 15 is not saved' in said.splitlines()[-1]
    status, said = end(start(limited, 10_000_000, *args))
    assert status == 0 and same_weights(a, model_module.newest_whole('b')), said

def test_a_disk_that_is_really_full():
    Path('disk').mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1200k', 'tmpfs', 'disk'], capture_output=True).returncode:
        pytest.skip('nothing can be mounted here')
    try:
        write_corpus()
        done = launch(HERE / 'train.py', *SMALL, '--max_iters=30', '--eval_interval=5', '--keep_checkpoints=9', '--sample_tokens=0', '--out_dir=disk/run')
        assert 'the disk is full' in one_line(done) and 'is not saved: the disk is full' in done.stdout
        steps = [int(p.name[5:]) for p in model_module.checkpoints('disk/run')]
        assert steps[:1] == [5] and steps[-1] < 30 and not list(Path('disk/run').glob('.*partial'))
        model_module.load_model(model_module.newest_whole('disk/run'))
    finally:
        subprocess.run(['umount', '-l', 'disk'])

def test_old_checkpoints_stay_where_the_new_one_can_not_be_read_back(monkeypatch, capsys):
    train_here('--max_iters=5', '--lr_decay_iters=15', '--out_dir=a')
    real = model_module.save_file
    monkeypatch.setattr(model_module, 'save_file', lambda tensors, path, **kw: real({k: x + 1e-3 * (x.dim() > 1) for k, x in tensors.items()}, path, **kw))
    with pytest.raises(UserError, match='step 15 is not saved: .*does not hold what was written'):
        train_here('--max_iters=15', '--eval_interval=5', '--keep_checkpoints=1', '--out_dir=a', '--init_from=resume')
    assert 'step 10 is not saved: ' in capsys.readouterr().out
    assert sorted(p.name for p in Path('a').iterdir() if 'step' in p.name) == ['step_00000005'] and model_module.newest_whole('a')

def test_a_second_run_in_the_same_folder_is_refused_until_the_first_one_ends():
    prepared_corpus()
    args = ['--max_iters=100000', '--eval_interval=5', '--eval_tokens=16', '--sample_tokens=0', '--dataset=data/corpus-bpe300']
    first = start(train_with, *args, '--out_dir=a')
    wait_for(Path('a/log.jsonl'), 10, first)
    for how in 'auto', 'resume':
        status, said = end(start(train_with, *args, '--out_dir=a', f'--init_from={how}'))
        assert status == 2 and said.splitlines()[-1] == 'error: another process trains in a: wait for its end, stop it, or give another --out_dir'
    os.kill(first, signal.SIGKILL)
    end(first)
    status, said = end(start(train_with, *args, '--max_iters=1', '--out_dir=a', '--init_from=auto'))
    assert status == 0 and 'is complete' in said or 'resumed' in said

def test_what_changed_is_said_and_what_may_not_change_is_named(capsys):
    run_with_two_checkpoints()
    write_corpus('other.txt', 22)
    for knob, says in (('--n_embd=64', 'n_embd = 32, not 64'), ('--dataset=other.txt', "dataset = 'corpus.txt', not 'other.txt'"),
                       ('--tokenizer=char', "tokenizer = 'bpe', not 'char'"), ('--mlp=gelu', "mlp = swiglu, not gelu"),
                       ('--block_size=32', 'block_size = 16, not 32'), ('--optimizer=adamw', 'optimizer = muon, not adamw')):
        with pytest.raises(UserError, match=says):
            train_here('--max_iters=20', '--out_dir=a', '--init_from=resume', knob)
    capsys.readouterr()
    module, asked = script('train', *SMALL, '--max_iters=20', '--learning_rate=1e-3', '--batch_size=4', '--out_dir=a', '--init_from=resume'), []
    starts = module.window_starts
    module.window_starts = lambda first, count, *args: (asked.append((first, count)), starts(first, count, *args))[1]
    module.main()
    assert asked == [(10 * 8 + 4 * i, 4) for i in range(10)]        # no window is skipped, none comes twice
    changed = re.search('changed   [|] (.*)', capsys.readouterr().out)[1].split(', ')
    assert {'max_iters 10 -> 20', 'learning_rate 0.006 -> 0.001', 'batch_size 8 -> 4'} < set(changed)
    state = configurator.read_json(model_module.checkpoints('a')[-1] / 'training.json')
    assert state['windows'] == 10 * 8 + 10 * 4
    train_here('--max_iters=20', '--learning_rate=1e-3', '--batch_size=4', '--out_dir=a', '--init_from=resume')
    assert 'changed' not in capsys.readouterr().out

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]

@pytest.mark.parametrize('ranks', [1, 2])
def test_a_signal_at_any_moment_is_obeyed_with_a_checkpoint_and_nothing_is_lost(ranks):
    prepared_corpus()
    args = ['--max_iters=100', '--eval_interval=7', '--eval_tokens=600', '--sample_tokens=0', '--dropout=0.1', '--micro_batch_size=2',
            '--dataset=data/corpus-bpe300', '--init_from=auto']
    def run(out, *moments):
        pids = start_ranks(ranks, *args, f'--out_dir={out}') if ranks > 1 else [start(train_with, *args, f'--out_dir={out}')]
        begun = time.monotonic()
        if moments:
            wait_for(Path(out) / 'log.jsonl', 1, pids[0])
        for wait, pid, kind in moments:
            time.sleep(wait)
            os.kill(pids[pid], kind)
            begun = time.monotonic()
        return [*map(end, pids)], time.monotonic() - begun
    t = time.monotonic()
    assert [status for status, _ in run('a')[0]] == [0] * ranks
    seconds, rng, steps = time.monotonic() - t - 0.5, random.Random(ranks), []
    straight = model_module.checkpoints('a')[-1]
    for i in range((40 if ranks == 1 else 20) if LONG else 2):
        kind = SIGNALS[i % 3]
        moments = [(rng.uniform(0, 0.8) * seconds, 0, kind), *((rng.uniform(0, 0.1), r, kind) for r in range(1, ranks))]
        ends, took = run('b', *moments)
        if any(status for status, _ in ends):
            assert all(status == 128 + kind for status, _ in ends), ends
            assert took < 10 and 'Traceback' not in ends[0][1] and 'stopped at step ' in ends[0][1]
            step = int(re.search(r'stopped at step (\d+); saved b', ends[0][1])[1])
            last = model_module.newest_whole('b')
            steps.append(int(last.name[5:]))
            assert step == steps[-1]
            assert [status for status, _ in run('b')[0]] == [0] * ranks
        assert same_weights(straight, model_module.checkpoints('b')[-1])
        shutil.rmtree('b')
    assert steps and len(set(steps)) > len(steps) / 2

def test_a_step_that_takes_long_is_waited_for():
    prepared_corpus()
    def slowly(module):
        find_speed, module.StopSignal.patience = module.find_speed, 0.3
        def found(*args):
            fast, *rest = find_speed(*args)
            return (lambda *batch: (torch.is_grad_enabled() and time.sleep(1.2), fast(*batch))[1]), *rest
        module.find_speed = found
    pid = start(functools.partial(train_with, change=slowly), '--max_iters=100', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a')
    wait_for(Path('a/log.jsonl'), 1, pid)
    os.kill(pid, signal.SIGTERM)
    status, said = end(pid)
    assert status == 128 + signal.SIGTERM and 'stopped at step 2; saved a' in said

def test_a_signal_that_comes_late_to_one_of_two_does_not_take_it_from_the_other():
    prepared_corpus()
    def slowly(module):
        save = module.save_checkpoint
        module.save_checkpoint = lambda *args: (Path('saving').touch(), time.sleep(1), save(*args))[2]
    pids = start_ranks(2, '--max_iters=100000', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a', change=slowly)
    wait_for(Path('a/log.jsonl'), 3, pids[0])
    os.kill(pids[0], signal.SIGTERM)
    while not os.path.exists('saving'):
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGTERM)        # which waits for the other to have saved
    ends = [*map(end, pids)]
    assert [status for status, _ in ends] == [128 + signal.SIGTERM] * 2 and model_module.newest_whole('a'), ends

def test_the_time_of_a_run_is_counted_once():
    train_here('--max_iters=1', '--out_dir=a')
    begun = time.perf_counter()
    _, log, last = train_here('--max_iters=8', '--eval_interval=1', '--out_dir=b')
    seconds = configurator.read_json(last / 'training.json')['seconds']
    assert log[-2]['seconds'] <= seconds < time.perf_counter() - begun

def test_processes_that_differ_on_how_long_a_step_takes_stop_at_the_same_one():
    prepared_corpus()
    def hurried(module):
        clock = time.perf_counter
        if os.environ['RANK'] == '1':
            time.perf_counter = lambda: 10_000 * clock()        # each step seems long
    pids = start_ranks(2, '--max_iters=100000', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a', change=hurried)
    wait_for(Path('a/log.jsonl'), 5, pids[0])
    os.kill(pids[0], signal.SIGTERM)        # only one hears it
    ends = [*map(end, pids)]
    assert [status for status, _ in ends] == [128 + signal.SIGTERM] * 2 and 'stopped at step' in ends[0][1], ends
    assert model_module.newest_whole('a')

@pytest.mark.parametrize('kind', SIGNALS)
def test_a_signal_before_the_first_step_ends_it_at_once(kind):
    prepared_corpus()
    args = ['--max_iters=4', '--dataset=data/corpus-bpe300', '--init_from=auto', '--out_dir=a', '--sample_tokens=0']
    def compiling(module):
        module.estimate = lambda *args: (print('compiling'), time.sleep(30))
    for step in 0, 4:       # of a new run, and of one that has a checkpoint
        pid = start(functools.partial(train_with, change=compiling), *args, '--max_iters=6')
        wait_for(Path(f'{pid}.out'), 'compiling', pid)
        begun = time.monotonic()
        os.kill(pid, kind)
        status, said = end(pid)
        assert status == 128 + kind and time.monotonic() - begun < 2 and 'nothing new to save' in said and 'Traceback' not in said
        assert [p.name for p in model_module.checkpoints('a')] == ['step_00000004'] * bool(step)
        if not step:
            assert end(start(train_with, *args))[0] == 0
            before = weights(model_module.newest_whole('a'))
    assert all(torch.equal(x, before[k]) for k, x in weights(model_module.newest_whole('a')).items())

def test_a_second_ctrl_c_ends_at_once_and_leaves_the_last_checkpoint():
    prepared_corpus()
    def stuck(module):
        save = module.save_checkpoint
        def slowly(folder, *args):
            if folder.name != 'step_00000005':
                print('saving')
                (folder.parent / f'.{folder.name}.partial').mkdir()
                time.sleep(30)
            save(folder, *args)
        module.save_checkpoint = slowly
    args = ['--max_iters=1000', '--eval_interval=5', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a']
    pid = start(functools.partial(train_with, change=stuck), *args)
    wait_for(Path('a/log.jsonl'), 6, pid)
    wait_for(Path(f'{pid}.out'), 'saving', pid)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)     # as torchrun does: this is the same one
    time.sleep(1)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGINT)
    status, said = end(pid, 3)
    assert status == 130 and model_module.newest_whole('a').name == 'step_00000005' and 'Traceback' not in said, said
    assert end(start(train_with, *args, '--max_iters=6', '--init_from=resume'))[0] == 0 and not list(Path('a').glob('.step*'))

def test_a_process_that_waits_in_vain_leaves_ten_seconds_after_a_signal():
    prepared_corpus()
    pids = start_ranks(2, '--max_iters=100000', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a',
                       change=lambda module: setattr(module.StopSignal, 'patience', 1.0))
    wait_for(Path('a/log.jsonl'), 20, pids[0])
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.3)
    begun = time.monotonic()
    os.kill(pids[0], signal.SIGTERM)
    assert end(pids[0])[0] == 128 + signal.SIGTERM and 0.5 < time.monotonic() - begun < 5
    os.kill(pids[1], signal.SIGKILL)
    end(pids[1])

# -- values that are not finite

def spoil(step, rank, what, value):
    """A change of train.py that puts a value into the loss, a gradient or a weight at a step, on one rank."""
    def change(module):
        find_speed, get_lr, made, now = module.find_speed, module.get_lr, [], [-1]
        mine = os.environ.get('RANK', '0') == str(rank)
        class Known(module.FlatOptimizer):
            def __init__(self, model, *args, **kwargs):
                super().__init__(model, *args, **kwargs)
                made.append((self, model))
        def looked(it, *args):      # once a step, before it
            now[0] = it - 1
            if mine and now[0] == step and what == 'weight':
                made[0][1].h[1].mlp.up.weight.data[3, 5] = value
            return get_lr(it, *args)
        def found(model, *args):
            fast, *rest = find_speed(model, *args)
            if what == 'gradient':
                model.h[0].attn.c_proj.weight.register_hook(lambda g: g * (value if mine and now[0] == step else 1))
            def spoiled(x, y):
                logits, loss = fast(x, y)
                return logits, loss * value if what == 'loss' and mine and now[0] == step and torch.is_grad_enabled() else loss
            return spoiled, *rest
        module.FlatOptimizer, module.get_lr, module.find_speed = Known, looked, found
        main = module.main
        def watched():
            try:
                main()
            finally:
                os.makedirs('left', exist_ok=True)
                torch.save(made[0][0].p, f'left/{os.environ.get("RANK", 0)}.pt')
        module.main = watched
    return change

@pytest.mark.parametrize('what, says', [('loss', 'the loss'), ('gradient', 'the gradient of h.0.attn.c_proj.weight'), ('weight', 'the weight h.1.mlp.up.weight')])
def test_what_is_not_finite_stops_all_processes_before_any_weight_changes(what, says):
    prepared_corpus()
    rng = random.Random(len(what))
    args = ['--eval_interval=6', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--log_interval=5', '--lr_decay_iters=40', '--micro_batch_size=4']
    for i in range(10 if LONG else 2):
        ranks, step, value = (1 if i == 1 else 2), rng.randrange(1, 30), rng.choice([math.nan, math.inf, -math.inf])
        change = spoil(step, ranks - 1, what, value)
        pids = start_ranks(ranks, *args, '--max_iters=40', f'--out_dir=a{i}', change=change) if ranks == 2 else \
            [start(functools.partial(train_with, change=change), *args, '--max_iters=40', f'--out_dir=a{i}')]
        ends = [*map(end, pids)]
        assert [status for status, _ in ends] == [3] * ranks, ends
        lines = [said.splitlines()[-1] for _, said in ends if 'diverged: ' in said]
        assert len(lines) == 1 and f'diverged: at step {step + 1} {says} was not finite' in lines[0], ends
        assert ('in process 1' in lines[0]) == (what == 'weight' and ranks == 2)
        logged = [e['step'] for e in train_module.read_log(Path(f'a{i}/log.jsonl')) if 'loss' in e]
        assert logged[-1] < step + 5 + (what == 'weight')      # within a log interval
        for checkpoint in model_module.checkpoints(f'a{i}'):
            assert int(checkpoint.name[5:]) <= step and all(x.isfinite().all() for x in weights(checkpoint).values())
        if step:
            _, _, good = train_here(*args, f'--max_iters={step}', f'--out_dir=b{i}')
            good = model_module.load_model(good)
            for r in range(ranks):
                p = torch.load(f'left/{r}.pt', weights_only=True)
                same = train_module.FlatOptimizer(good, rule='muon').p
                differ = (p != same).nonzero()
                assert len(differ) == (what == 'weight' and r == ranks - 1)

def test_an_activation_that_overflows_is_named():
    prepared_corpus()
    status, said = end(start(functools.partial(train_with, change=spoil(7, 0, 'weight', 3e38)), '--max_iters=40', '--sample_tokens=0',
                             '--dataset=data/corpus-bpe300', '--log_interval=5', '--out_dir=a'))
    assert status == 3 and re.search(r'diverged: at step 8 the output of h[.]1[.]mlp[.\w]* was not finite', said), said[-500:]

def test_processes_whose_weights_differ_stop():
    prepared_corpus()
    pids = start_ranks(2, '--max_iters=40', '--sample_tokens=0', '--dataset=data/corpus-bpe300', '--out_dir=a', '--eval_interval=4',
                       change=spoil(10, 1, 'weight', 0.25))
    ends = [*map(end, pids)]
    assert [status for status, _ in ends] == [3, 3] and 'the processes have different weights at step 11' in ends[0][1], ends
    assert model_module.newest_whole('a').name == 'step_00000008'

def test_the_step_of_the_optimizer_waits_for_nothing():
    with torch.device('meta'):      # tensors without values: who looks at one gets an exception
        model = GPT(tiny())
    optimizer = train_module.FlatOptimizer(model, rule='muon')
    for _ in range(2):
        model(torch.zeros(2, 16, dtype=torch.long, device='meta'), torch.zeros(2, 16, dtype=torch.long, device='meta'))[1].backward()
        norm = optimizer.step(0.1, 1.0)
    with pytest.raises(RuntimeError):
        float(norm)

# -- the same batches, and the same sums, for any number of processes

def test_the_batch_of_a_step_is_the_same_for_any_number_of_processes():
    prepared_corpus()
    def noting(module):
        class Noted(module.Shards):
            def __init__(self, folder, split, meta):
                super().__init__(folder, split, meta)
                self.split = split
            def batch(self, starts, T, place='cpu'):
                with open(f'windows{os.environ["WORLD_SIZE"]}', 'a') as f:
                    f.write(''.join(f'{s}\n' for s in starts) if self.split == 'train' and torch.is_grad_enabled() else '')
                return super().batch(starts, T, place)
        module.Shards, module.find_speed = Noted, lambda model, *args: (model, False, 2, 0.0)
    seen = {}
    for n in (1, 2, 4):
        for steps in (1, 2, 5) if LONG else (1, 5):
            Path(f'windows{n}').write_text('')
            ends = [*map(end, start_ranks(n, f'--max_iters={steps}', '--sample_tokens=0', '--dataset=data/corpus-bpe300', f'--out_dir={n}-{steps}', change=noting))]
            assert not any(status for status, _ in ends), ends
            seen.setdefault(steps, []).append(sorted(map(int, Path(f'windows{n}').read_text().split())))
    for steps, windows in seen.items():
        assert windows[0] == windows[1] == windows[2] and len(windows[0]) == 8 * steps

def test_two_and_four_processes_compute_what_one_does():
    prepared_corpus()
    args = ['--max_iters=50', '--dropout=0.1', '--micro_batch_size=2', '--eval_interval=25', '--sample_tokens=0', '--dataset=data/corpus-bpe300']
    _, one, last = train_here(*args, '--out_dir=one')
    for n in (2, 4):
        ends = [*map(end, start_ranks(n, *args, f'--out_dir={n}'))]
        assert [status for status, _ in ends] == [0] * n, ends
        log = train_module.read_log(Path(f'{n}/log.jsonl'))
        assert len(losses(log)) == 50 and losses(log) == pytest.approx(losses(one), abs=1e-5)
        assert [e['val_loss'] for e in log if 'val_loss' in e] == pytest.approx([e['val_loss'] for e in one if 'val_loss' in e], abs=1e-5)

def test_two_processes_are_one_with_twice_the_accumulation_bit_for_bit():
    prepared_corpus()
    args = ['--max_iters=50', '--eval_interval=20', '--sample_tokens=0', '--dropout=0.1', '--micro_batch_size=4', '--dataset=data/corpus-bpe300']
    ends = [*map(end, start_ranks(2, *args, '--out_dir=two'))]
    assert [status for status, _ in ends] == [0, 0], ends
    _, one, last = train_here(*args, '--out_dir=one')
    assert losses(train_module.read_log(Path('two/log.jsonl'))) == losses(one)
    assert same_weights(last, model_module.checkpoints('two')[-1])

# -- torchrun

def start_torchrun(n, *args, restarts=0):
    out = open('torchrun.out', 'w')
    return subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', f'--nproc_per_node={n}', f'--max-restarts={restarts}', '--rdzv_backend=c10d',
                             '--rdzv_endpoint=localhost:0', str(HERE / 'train.py'), *map(str, args)], stdout=out, stderr=out,
                            env=dict(os.environ, OMP_NUM_THREADS='1'))

def processes(mark):
    """The pids of running train.py with a mark in their arguments, but for torchrun itself; by rank."""
    out = subprocess.run(['ps', '-ww', '-eo', 'pid=,stat=,args='], capture_output=True, text=True).stdout
    return sorted(int(line.split()[0]) for line in out.splitlines() if mark in line and 'distributed.run' not in line and line.split()[1][0] != 'Z')

def test_torchrun_restarts_to_the_weights_of_a_run_that_was_not_disturbed():
    prepared_corpus()
    args = [*SMALL, '--max_iters=150', '--eval_interval=20', '--eval_tokens=64', '--sample_tokens=0', '--dropout=0.1', '--micro_batch_size=4',
            '--dataset=data/corpus-bpe300', '--init_from=auto']
    straight, rng = train_here(*args[len(SMALL):], '--out_dir=a')[2], random.Random(3)
    for i in range(20 if LONG else 1):
        mark = f'--out_dir=restarted{i}'
        job = start_torchrun(2, *args, mark, restarts=3)
        for k in range(2 if LONG else 1):
            log, after = Path(f'restarted{i}/log.jsonl'), rng.randrange(3, 20) + 25 * k
            deadline = time.monotonic() + 60
            while not (log.exists() and any(e['step'] >= after for e in train_module.read_log(log)) and len(processes(mark)) == 2):
                assert job.poll() is None and time.monotonic() < deadline, Path('torchrun.out').read_text()[-3000:]
                time.sleep(0.005)
            os.kill(rng.choice(processes(mark)), signal.SIGKILL)
            time.sleep(0.5)
        assert job.wait(120) == 0, Path('torchrun.out').read_text()[-3000:]
        assert same_weights(straight, model_module.checkpoints(f'restarted{i}')[-1]) and not processes(mark)

@pytest.mark.parametrize('what', ['raises', 'exits', 'is killed', 'stops', 'loses torchrun'] if LONG else ['raises'])
def test_where_one_process_fails_the_others_leave_and_it_is_named(what):
    prepared_corpus()
    Path('fault.py').write_text(f"""
import os as _os, signal as _signal, threading as _threading, time as _time
def _fault():
    while not (_os.path.exists('{what}/log.jsonl') and open('{what}/log.jsonl').read().count(chr(10)) > 20):
        _time.sleep(0.01)
    open('when', 'w').close()
    if '{what}' == 'raises':
        _signal.signal(_signal.SIGALRM, lambda *a: 1 / 0)
    _os.kill(*dict(raises=(_os.getpid(), _signal.SIGALRM), stops=(_os.getpid(), _signal.SIGSTOP), exits=(_os.getpid(), 0)).get(
        '{what}', (_os.getpid() if '{what}' == 'is killed' else _os.getppid(), _signal.SIGKILL)))
    if '{what}' == 'exits':
        _os._exit(7)
if _os.environ.get('RANK') == '1':
    if '{what}' == 'raises':
        _signal.signal(_signal.SIGALRM, lambda *a: 1 / 0)
    _threading.Thread(target=_fault, daemon=True).start()
""".replace("""    if 'raises' == 'raises':
        _signal.signal(_signal.SIGALRM, lambda *a: 1 / 0)
    _os.kill""", '    _os.kill'))
    mark = f'--out_dir={what}'
    job = start_torchrun(3, *SMALL, 'fault.py', '--max_iters=1000000', '--batch_size=9', '--eval_interval=10', '--eval_tokens=64', '--sample_tokens=0',
                         '--dataset=data/corpus-bpe300', '--timeout=8', mark)
    deadline = time.monotonic() + 120
    while not os.path.exists('when') or processes(mark):
        assert time.monotonic() < deadline, Path('torchrun.out').read_text()[-3000:]
        time.sleep(0.05)
    took = time.time() - os.stat('when').st_mtime
    status, said = job.wait(60), Path('torchrun.out').read_text()
    assert took < (8 + 45 if what == 'stops' else 15), took
    if what != 'loses torchrun':
        named = re.search(r'Root Cause.*?rank      : (\d)', said, re.S)[1]
        assert status == 1 and (named == '1') == (what != 'stops'), said[-3000:]
    assert 'Traceback' in said if what == 'raises' else 'train.py", line' not in said, said[-3000:]
    model_module.load_model(model_module.newest_whole(what))

# -- what a run does not depend on

@pytest.mark.parametrize('fails', ['import', 'init', 'log', 'finish', 'import waits', 'init waits', 'log waits', 'finish waits'] if LONG else
                         ['import', 'finish', 'log waits'])
def test_wandb_may_be_absent_fail_or_block_for_an_hour(fails, monkeypatch, capsys):
    _, straight, _ = train_here('--max_iters=4', '--out_dir=a')
    Path('wandb.py').write_text(f"""
import time
def fail(where):
    if {fails!r} == where:
        raise SystemExit('no wandb today')
    if {fails!r} == where + ' waits':
        time.sleep(3600)
def init(**kwargs): fail('init')
def log(*args, **kwargs): fail('log')
def finish(): fail('finish')
fail('import')
""")
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.delitem(sys.modules, 'wandb', raising=False)
    module = script('train', *SMALL, '--max_iters=4', '--out_dir=b', '--wandb_log=True')
    module.Wandb.patience = 10.0 if LONG else 0.3
    capsys.readouterr()
    begun = time.monotonic()
    module.main()
    assert time.monotonic() - begun < module.Wandb.patience + 20
    assert losses(train_module.read_log(Path('b/log.jsonl'))) == losses(straight)
    assert capsys.readouterr().out.count('\nwandb ') == 1
    monkeypatch.delitem(sys.modules, 'wandb', raising=False)

def test_a_closed_output_does_not_end_a_run():
    prepared_corpus()
    process = subprocess.Popen([sys.executable, str(HERE / 'train.py'), *SMALL, '--max_iters=20', '--eval_interval=5', '--dataset=data/corpus-bpe300', '--out_dir=a'],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, OMP_NUM_THREADS='1'))
    while not process.stdout.readline().startswith(b'step 1 '):
        pass
    process.stdout.close()      # `| head`
    assert process.stderr.read() == b'' and process.wait(60) == 0
    assert model_module.newest_whole('a').name == 'step_00000020' and len(losses(train_module.read_log(Path('a/log.jsonl')))) == 20

def test_a_long_run_needs_no_more_memory_or_files_than_a_short_one():
    prepared_corpus()
    steps = 2000 if LONG else 400
    def watch(module):
        evaluate = module.evaluate
        def measured(*args):
            with open('/proc/self/statm') as f:
                pages = int(f.read().split()[1])
            with open('seen', 'a') as f:
                f.write(f'{pages * os.sysconf("SC_PAGE_SIZE") / 1e6} {len(os.listdir("/proc/self/fd"))} {threading.active_count()}\n')
            return evaluate(*args)
        module.evaluate = measured
    if not os.path.exists('/proc/self/statm'):
        return
    status, said = end(start(functools.partial(train_with, change=watch), f'--max_iters={steps}', f'--eval_interval={steps // 20}', '--eval_tokens=64',
                             '--dataset=data/corpus-bpe300', '--out_dir=a'), 300)
    rows = [tuple(map(float, line.split())) for line in Path('seen').read_text().splitlines()]
    assert status == 0 and len(rows) == 20, said
    assert rows[-1][0] - rows[5][0] < 4 and rows[-1][1:] == rows[5][1:], rows       # MB, open files, threads

def test_the_readme_names_files_that_exist_and_lists_them_all():
    text = (HERE / 'README.md').read_text(encoding='utf-8')
    named = set(re.findall(r'(?:config/)?\w+\.py\b', text))
    local = {p.name for p in HERE.glob('*.py')} | {f'config/{p.name}' for p in (HERE / 'config').glob('*.py')}
    assert {n for n in named if n.startswith('config/') or n in {p.name for p in HERE.glob('*.py')}} <= local
    assert {p.name for p in HERE.glob('*.py')} <= named
    for command in re.findall(r'^(?:python|torchrun \S+) (\S+\.py)', text, re.M):
        assert (HERE / command).exists(), command

def test_the_adapter_of_the_readme_gives_a_course_its_own_rope(monkeypatch):
    monkeypatch.setattr(GPT, 'pad_to', GPT.pad_to)      # the adapter changes it
    monkeypatch.setattr(sys, 'path', [*sys.path])
    text = (HERE / 'README.md').read_text(encoding='utf-8')
    Path('adapters.py').write_text(re.search(r'```python\n(import sys, torch\n.*?)```', text, re.S)[1])
    space = runpy.run_path('adapters.py')
    assert len([name for name in space if name.startswith('run_')]) == 19 and GPT.pad_to == 1
    def turned(x, positions):       # neighbours as complex numbers
        angles = positions[..., None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    x, positions = torch.randn(2, 5, 8), torch.tensor([[3, 1, 4, 1, 5], [0, 1, 2, 3, 4]])
    close(space['run_rope'](8, 100.0, 16, x, positions), turned(x, positions), 1e-5)
    wq, wk, wv, wo = torch.randn(4, 16, 16) / 4
    x = torch.randn(2, 5, 16)
    q, k, v = ((x @ w.T).unflatten(-1, (2, 8)).transpose(1, 2) for w in (wq, wk, wv))
    y = F.scaled_dot_product_attention(turned(q, torch.arange(5)), turned(k, torch.arange(5)), v, is_causal=True).transpose(1, 2).flatten(2) @ wo.T
    close(space['run_multihead_self_attention_with_rope'](16, 2, 16, 100.0, wq, wk, wv, wo, x), y, 1e-5)
    assert space['get_adamw_cls']()(torch.nn.Linear(2, 2).parameters(), lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)

if __name__ == '__main__':
    if '--long' in sys.argv:
        os.environ['LONG'] = '1'
    sys.exit(pytest.main([__file__, '-q', *(arg for arg in sys.argv[1:] if arg != '--long')]))
