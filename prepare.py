"""
Turns raw text into token shards that train.py reads.

    python prepare.py                                            # the Python standard library, BPE of 4,096
    python prepare.py --dataset=names --tokenizer=char
    python prepare.py --dataset=tinystories --vocab_size=10000
    python prepare.py --dataset=path/to/my_text.txt              # a file (.txt, .jsonl, also .gz .xz .zst) or a folder
    python prepare.py --tokenizer=data/names-bpe4096/tokenizer.json    # how well does the tokenizer of another text do?

It writes data/<name>-<tokenizer><vocab_size>/ with train_000.bin, ..., val_000.bin (headerless uint16; uint32 if the
vocabulary is above 65,536), meta.json and tokenizer.json, and ends with a summary. train.py prepares missing data by
itself.
"""
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import suppress
from functools import lru_cache, partial
from glob import glob
from itertools import accumulate, chain, islice
from pathlib import Path

import fsspec
import numpy as np
from filelock import FileLock
from tqdm import tqdm

from configurator import UserError, configure, file_sha256, launch, read_json, whole_folder
from tokenizer import (BLOCK, END_OF_TEXT, PATTERNS, CharTokenizer, Tokenizer, WordCounter, WordTokenizer,
                       add_counts, byte_tokenizer, check_vocab_size, default_workers, load_tokenizer, merge_words,
                       parallel_map, read_blocks)

# -----------------------------------------------------------------------------
dataset = 'python'          # python, tinystories, openwebtext, fineweb_edu, shakespeare, names, or any path
val_dataset = ''            # the path of the text for validation; '': some of dataset
tokenizer = 'bpe'           # bpe, char, byte, word, gpt2, or the path of a tokenizer.json. Its special tokens are
                            # text like any other in documents, and ids in the prompt of sample.py
vocab_size = 4096           # of bpe (257 or more) and word, special tokens included
pattern = 'gpt2'            # how bpe cuts text into words: gpt2 or gpt4
val_fraction = 0.0          # share of the documents held out for validation, below 1; 0: the data set's own, or 0.1
separator = END_OF_TEXT     # <|endoftext|>, between the documents of a file; \n: each line is one; '': each file is one
text_field = 'text'         # the field of a .jsonl line, or column of a .parquet file, that holds the text
shard_tokens = 100_000_000  # tokens per .bin file, 1 or more
workers = 0                 # processes; 0: one per core
# -----------------------------------------------------------------------------
config = configure(globals())

# An option is a parameter of a function if train.py (dataset, tokenizer, vocab_size) or DATASETS (separator,
# val_fraction) may give it another value, or if the function runs in worker processes (see in_parallel): on macOS and
# Windows these import this file anew, and every option has its default there. Functions read other options directly.
TOKENIZERS = ('bpe', 'char', 'byte', 'word', 'gpt2')

def check_knobs(tokenizer, vocab_size):
    """Raises UserError if a knob's value is not valid."""
    if tokenizer not in TOKENIZERS and not os.path.isfile(tokenizer):
        raise UserError(f'there is no tokenizer {tokenizer!r}: give one of {", ".join(TOKENIZERS)}, or the path of a '
                        f'tokenizer.json')
    if pattern not in PATTERNS:
        raise UserError(f'there is no pattern {pattern!r}: give one of {", ".join(PATTERNS)}')
    if tokenizer == 'bpe':
        check_vocab_size(vocab_size, [END_OF_TEXT])
    if not 0 <= val_fraction < 1 or shard_tokens < 1:
        raise UserError('val_fraction must be at least 0 and below 1, and shard_tokens at least 1; change them')

# -----------------------------------------------------------------------------
# where the text comes from

DATASETS = {    # a repo on the Hugging Face hub or a url; train, val: files; start: how train.py's sample text begins
    'python': dict(separator='', start='def'),
    'tinystories': dict(repo='roneneldan/TinyStories', train=['TinyStoriesV2-GPT4-train.txt'],
                        val=['TinyStoriesV2-GPT4-valid.txt']),
    'openwebtext': dict(repo='stanford-cs336/owt-sample', train=['owt_train.txt.gz'], val=['owt_valid.txt.gz']),
    'fineweb_edu': dict(repo='HuggingFaceFW/fineweb-edu', val_fraction=0.001,
                        train=[f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)]),
    'shakespeare': dict(url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                        train=['tinyshakespeare.txt'],
                        sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'),
    'names': dict(url='https://raw.githubusercontent.com/karpathy/makemore/master/names.txt', train=['names.txt'],
                  separator='\n',
                  sha256='0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d'),
}
DOWNLOADS = Path('data/downloads')

def find_source(dataset):
    """-> settings for meta.json; the files (none if there is no such text); the validation files, if separate."""
    known = DATASETS.get(dataset, {})
    files = [DOWNLOADS / name for name in known.get('train', [])]
    val_files = [DOWNLOADS / name for name in known.get('val', [])]
    source = dataset
    if dataset == 'python':
        files = standard_library()
        source = f'Python {sys.version.split()[0]}'
    elif not known:
        files, val_files = own_files(dataset)
        # relative if inside this folder, so that a project can be moved with its data
        source = Path(dataset).resolve().as_posix().removeprefix(f'{Path.cwd().as_posix()}/')
    if val_dataset:
        val_files = sum(own_files(val_dataset), [])
    separate = val_dataset or 'val' in known
    # all options that change the tokens: a folder that was made with other values is refused
    settings = dict(
        dataset=data_name(dataset), source=source,
        val_fraction=0.0 if separate else val_fraction or known.get('val_fraction', 0.1),
        separator=known.get('separator', separator.replace('\\n', '\n')),     # a command line makes line breaks hard
        text_field=text_field, pattern=pattern, val_dataset=val_dataset)
    return settings, files, val_files

def standard_library():
    """The .py files of the running interpreter, without tests, installed packages, tables and prose."""
    root = Path(os.__file__).parent
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'encodings', 'pydoc_data'}
    files = [path for path in root.rglob('*.py') if skip.isdisjoint(path.relative_to(root).parts)]
    return sorted(files, key=Path.as_posix)

def own_files(path):
    """
    -> the files at a path, and those that are for validation by their names. In a folder with .parquet or .jsonl, these
    alone are its files, and those for tests are neither.
    """
    if os.path.isfile(path):
        return [Path(path)], []
    found = [Path(path, name) for name in glob('**', root_dir=path, recursive=True)]        # without hidden ones
    found = sorted(filter(Path.is_file, found))
    tables = [file for file in found if {'.parquet', '.jsonl'} & {*file.suffixes}]
    val = [file for file in tables if re.match('(val|valid|validation)(?![a-z])', file.name)]
    train = [file for file in tables if not re.match('(val|valid|validation|test)(?![a-z])', file.name)]
    return (train, val) if train else (tables or found, [])

def is_text(path):
    """Whether a file begins without a NUL, as text does, or is of a format that is read in another way."""
    with open(path, 'rb') as file:
        return b'\0' not in file.read(8000) or path.suffix in ('.gz', '.xz', '.zst', '.parquet')

def joint_sha256(shas):
    """One sha256 that stands for several, in order."""
    return hashlib.sha256(''.join(shas).encode()).hexdigest()

def fetch(files, known):
    """Downloads missing files. known: their repo (and repo_type), or the url and sha256 of one. Raises UserError."""
    for path in files:
        if path.exists():
            continue
        try:
            if 'repo' in known:
                from huggingface_hub import hf_hub_download
                hf_hub_download(known['repo'], path.relative_to(DOWNLOADS).as_posix(),
                                repo_type=known.get('repo_type', 'dataset'), local_dir=DOWNLOADS)
            else:
                from torch.hub import download_url_to_file
                download_url_to_file(known['url'], path, known['sha256'])
        except Exception as e:      # a network has many ways to fail
            raise UserError(f'cannot download {path.name} ({e}): put the file at {path} by hand and run this again; '
                            f'--dataset=python and your own files need no network')

def data_name(dataset):
    """The name of a data set, or the stem of a path: data_name('texts/books.txt.xz') -> 'books'"""
    stem = Path(dataset).resolve().name.split('.')[0]
    return re.sub(r'[^\w-]', '_', stem)

def data_folder(dataset, tokenizer, vocab_size):
    """Where the shards of a data set are: data_folder('names', 'char', 0) -> Path('data/names-char')"""
    kind = tokenizer
    if tokenizer in ('bpe', 'word'):
        kind = f'{tokenizer}{vocab_size}'
    elif tokenizer not in TOKENIZERS:
        kind = f'tok{file_sha256(tokenizer)[:8]}'
    return Path(f'data/{data_name(dataset)}-{kind}')

# -----------------------------------------------------------------------------
# documents, as UTF-8 bytes

def documents(files, separator):
    """Yields the documents in files, except those that are only white space. Raises UserError."""
    for path in files:
        try:
            # if each file is one document, the separator is NUL: a file that contains one is cut there
            yield from filter(bytes.strip, read_file(path, separator or '\0', alone=len(files) == 1))
        except UserError:
            raise
        except Exception as e:      # every format has errors of its own
            raise UserError(f'cannot read {path} ({type(e).__name__}: {e}); check the file and --text_field; .parquet '
                            f'needs `pip install pyarrow`, .zst `pip install backports.zstd`')

def read_file(path, separator, alone):
    """Yields the texts of a file. Only one that is alone, not in a folder, may be a table as .json or .csv."""
    with fsspec.open(path, compression='zstd' if path.suffix == '.zst' else 'infer') as file:
        if path.suffix == '.parquet':
            import pyarrow.parquet
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(256, columns=[text_field])
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        elif '.jsonl' in path.suffixes:
            rows = map(json.loads, filter(bytes.strip, file))
        elif alone and '.json' in path.suffixes:
            rows = json.load(file)
        elif alone and '.csv' in path.suffixes:
            csv.field_size_limit(1 << 30)       # of a text, in characters; 131,072 is the default
            rows = csv.DictReader(io.TextIOWrapper(file, 'utf-8-sig', newline=''))
        else:
            yield from cut_text(file, path, separator)
            return
        for row in rows:
            if text_field not in row:
                raise UserError(f'{path}: a row has no {text_field!r}, and its fields are {", ".join(row)}: give '
                                f'--text_field, or leave such rows out')
            yield (row[text_field] or '').encode()

def cut_text(file, path, separator):
    """Cuts a text at its separators."""
    if file.read(3) != codecs.BOM_UTF8:
        file.seek(0)
    parts = []
    for block in read_blocks(file, path, [separator]):
        first, *others = block.split(separator.encode())
        parts.append(first)
        for text in others:
            yield b''.join(parts)
            parts = [text]
    yield b''.join(parts)

# -----------------------------------------------------------------------------
# the validation split, and batches (split, raw) of about BLOCK bytes. In raw, a byte 0xff, which UTF-8 never contains,
# marks the end of a document

def join_parts(parts):
    """Joins (split, part of a text) to batches."""
    waiting = defaultdict(bytearray)
    for split, part in parts:
        waiting[split] += part
        if len(waiting[split]) >= BLOCK:
            yield split, bytes(waiting.pop(split))
    for split, rest in waiting.items():
        yield split, bytes(rest)

def split_documents(files, val_files, separator, val_fraction):
    """Yields (split, part of the text), in order. Without val_files, validation gets val_fraction of the documents."""
    if val_files:
        for split, paths in ('train', files), ('val', val_files):
            for text in documents(paths, separator):
                yield split, text + b'\xff'
        return
    docs = documents(files, separator)
    first = list(islice(docs, 1000))
    if len(first) < 20:
        yield from split_by_position(first, val_fraction)
        return
    # a document stays in its split when others come or go, unless none of the first 1,000 hashes is below val_fraction:
    # then the lowest of them is the limit, so that validation is not empty
    limit = max(val_fraction, min(map(document_hash, first)))
    for text in chain(first, docs):
        split = 'val' if document_hash(text) <= limit else 'train'
        yield split, text + b'\xff'

def document_hash(text):
    """A number in [0, 1) that depends on the text alone."""
    return int(hashlib.blake2b(text, digest_size=8).hexdigest(), 16) / 2 ** 64

def split_by_position(docs, val_fraction):
    """Holds out the end of the text for validation, as nanoGPT does."""
    texts = [raw.decode() for raw in docs]
    left = int(sum(map(len, texts)) * (1 - val_fraction))       # characters that training still gets
    for text in texts:
        for split, part in ('train', text[:left]), ('val', text[left:]):
            # in blocks that end between words, because a batch may end after any of them
            for block in read_blocks(io.BytesIO(part.encode()), split):
                yield split, block
                end = split
        yield end, b'\xff'      # the end mark goes where the last character went
        left -= len(text[:left])

# -----------------------------------------------------------------------------
# tokens

def in_parallel(function, batches):
    """Maps batches on all cores, with a progress bar. function runs in worker processes: see the comment on options."""
    bar = tqdm(batches, unit='MB', unit_scale=BLOCK / 1e6, disable=None, leave=False)
    return parallel_map(function, bar, workers or default_workers())

def make_tokenizer(kind, vocab_size, batches):
    """A tokenizer of this kind, learned from batches if it needs text, or the one in a tokenizer.json."""
    if kind == 'byte':
        return byte_tokenizer()
    if kind == 'gpt2':          # the file of its release, downloaded once
        kind = DOWNLOADS / 'tokenizer.json'
        fetch([kind], dict(repo='openai-community/gpt2', repo_type='model'))
    if kind not in TOKENIZERS:
        tok = load_tokenizer(kind)
        if tok.eot is None:
            raise UserError(f"no token of {kind} is known to end a document; put the model's config.json, with its "
                            f'eos_token_id, next to it')
        return tok

    if kind == 'char':          # learns from both splits, the others only from train
        alphabet = set()
        for _, raw in batches:
            alphabet.update(raw.decode(errors='ignore'))        # without the 0xff
        return CharTokenizer(sorted(alphabet))

    train = (raw for split, raw in batches if split == 'train')
    if kind == 'word':
        find_words = WordTokenizer([]).pattern.findall
        counts = Counter()
        for raw in train:
            for text in raw.split(b'\xff'):
                counts.update(find_words(text.decode()))
        most_frequent = sorted(counts, key=lambda word: (-counts[word], word))
        return WordTokenizer(most_frequent[:vocab_size - 2])    # the two others are <unk> and the end of a document
    counts = add_counts(in_parallel(WordCounter(pattern), train), pattern)
    return Tokenizer(*merge_words(counts, vocab_size, [END_OF_TEXT]), [END_OF_TEXT], pattern)

def encode_batch(tok, batch):
    """
    Returns the split of a batch, its ids and counts for meta.json. Runs in worker processes, so it reads no option;
    pass those that it needs as parameters.
    """
    split, raw = batch
    ends = raw.count(b'\xff')
    ids = tok.encode_bytes(raw, [tok.eot] * ends)
    for id in reversed(tok.opening):        # of the next document; that of the first is added by write_shards
        ids = np.insert(ids, np.flatnonzero(ids == tok.eot) + 1, id)
    size = len(raw) - ends
    lost = 0        # bytes of words that tok lacks
    if hasattr(tok, 'unknown'):
        lost = size - len(known_text(tok, ids))
    return split, ids, dict(documents=ends, bytes=size, unknown_bytes=lost)

def known_text(tok, ids):
    """The bytes of a text, without its unknown words and the ends of documents."""
    return tok.decode_bytes(ids[~np.isin(ids, (tok.eot, getattr(tok, 'unknown', -1)))])

# -----------------------------------------------------------------------------
# a data folder: written under another name, and renamed when it is complete and on the disk

def find_or_prepare(dataset, tokenizer, vocab_size=4096):
    """
    The data folder of a data set, prepared if it is missing; or dataset itself, if it is a data folder. If several
    processes want it, one prepares it and the others wait. The text is not needed afterwards. Raises UserError if it
    cannot be read, or if the folder was made from another text or with other settings.
    """
    folder = Path(dataset)
    if (folder / 'meta.json').exists() or (folder / 'train.bin').exists():
        return folder
    check_knobs(tokenizer, vocab_size)
    folder = data_folder(dataset, tokenizer, vocab_size)
    settings, files, val_files = find_source(dataset)
    own = files + val_files         # the user's files, which may change; those of DATASETS do not
    if dataset in DATASETS:
        own = val_files if val_dataset else []
    written = sum(path.stat().st_mtime_ns for path in own)
    gone = not files or (val_dataset and not val_files)
    if not folder.exists():
        if gone:
            raise UserError(f'there is no data set {val_dataset if files else dataset!r}: give a file, a folder with '
                            f'files, or one of {", ".join(DATASETS)}')
        os.makedirs(DOWNLOADS, exist_ok=True)
        with FileLock(folder.with_name(f'.{folder.name}.lock')):
            if not folder.exists():         # Another process may have made it meanwhile.
                fetch(files + val_files, DATASETS.get(dataset))
                settings.update(source_time=written, source_sha256=joint_sha256(map(file_sha256, own)))
                make_folder(folder, settings, files, val_files, tokenizer, vocab_size)

    # A folder that is older than a setting was made with the option's default. If the text is gone, it is enough.
    made_with = config.defaults | read_meta(folder)
    if not gone and made_with.get('source_time', written) != written:
        settings['source_sha256'] = joint_sha256(map(file_sha256, own))
    for key, value in settings.items():
        if made_with[key] != value:
            raise UserError(f'{folder} was made with {key} = {made_with[key]!r}, not {value!r}: remove it to make it '
                            f'again, rename the text, or train on it as it is with --dataset={folder}')
    return folder

def make_folder(folder, settings, files, val_files, tokenizer, vocab_size):
    """Makes a data folder and prints the summary."""
    texts = [path for path in files if len(files) == 1 or is_text(path)]
    print(f'preparing {settings["source"]} -> {folder} (files: {len(texts)}, left out as no text: '
          f'{len(files) - len(texts)})')
    read = partial(split_documents, texts, val_files, settings['separator'], settings['val_fraction'])
    tok = make_tokenizer(tokenizer, vocab_size, join_parts(read()))
    meta = dict(settings, tokenizer=tokenizer, vocab_size=tok.vocab_size, dtype=np.dtype(tok.dtype).str, eot=tok.eot)

    with whole_folder(folder) as new:
        meta.update(write_shards(new, tok, join_parts(read())))
        meta['val'].update(compress(new / 'val_000.bin', tok))
        tok.save(new / 'tokenizer.json')
        meta['tokenizer_sha256'] = file_sha256(new / 'tokenizer.json')
        (new / 'meta.json').write_text(json.dumps(meta, indent=1))
    print_summary(meta, tok)

def write_shards(folder, tok, batches):
    """Encodes batches into shards. Returns {split: its entry in meta.json}."""
    meta = dict(train=Counter(), val=Counter())
    for split, ids, counts in in_parallel(partial(encode_batch, tok), batches):
        start = meta[split]['tokens']
        if start == 0:
            ids = np.insert(ids, 0, tok.opening)
        counts['tokens'] = len(ids)
        cuts = range(shard_tokens - start % shard_tokens, len(ids), shard_tokens)
        for i, part in enumerate(np.split(ids, cuts), start // shard_tokens):
            with open(folder / f'{split}_{i:03d}.bin', 'ab') as file:
                file.write(part)
        meta[split].update(counts)          # a Counter adds

    for split, counts in meta.items():
        if not counts['tokens']:
            raise UserError(f'the {split} split is empty: give more text, or another --val_fraction')
        names = [f'{split}_{start // shard_tokens:03d}.bin' for start in range(0, counts['tokens'], shard_tokens)]
        counts['shards'] = [check_shard(folder / name, tok.dtype, tok.vocab_size) for name in names]
    return meta

def compress(shard, tok):
    """What gzip and xz need for the first tokens of a shard, in bits per byte, to compare with a model."""
    text = known_text(tok, np.fromfile(shard, tok.dtype, 1 << 17))
    scale = 8 / max(len(text), 1)
    return dict(gzip_bpb=scale * len(gzip.compress(text, 9)), xz_bpb=scale * len(lzma.compress(text, preset=9)))

# -----------------------------------------------------------------------------
# the summary

def print_summary(meta, tok):
    for split in ('train', 'val'):
        m = meta[split]
        print(f'{split:14} | {m["documents"]:,} documents | {m["bytes"]:,} bytes | {m["tokens"]:,} tokens | '
              f'{m["bytes"] / m["tokens"]:.2f} bytes per token | {m["unknown_bytes"]:,} bytes unknown')
    tokens = sorted(tok.vocab.values(), key=len)
    print(f'vocabulary     | {len(tok.vocab):,} tokens, the longest:',
          [token.decode(errors='replace') for token in tokens[-5:]])

# -----------------------------------------------------------------------------
# what train.py reads

def read_meta(folder):
    """meta.json of a data folder, or a substitute for nanoGPT's folders of train.bin and val.bin, which have none."""
    path = folder / 'meta.json'
    if path.exists():
        return read_json(path)
    return dict(source='no meta.json: taken as tokens of GPT-2 (bits per byte not known)', vocab_size=50257, eot=50256,
                dtype='<u2', train=dict(shards=[dict(name='train.bin')]), val=dict(shards=[dict(name='val.bin')]))

def check_data(folder, meta):
    """
    Checks that the files are the ones that meta describes and that every id is in the vocabulary. A shard is read once,
    and again only if it has changed: checked.json keeps what was found. -> meta, where nanoGPT's shards now have tokens
    and sha256, too. Raises UserError.
    """
    cache = folder / 'checked.json'
    known = {}
    with suppress(UserError):           # if it is missing or damaged
        known = read_json(cache)
    file = folder / 'tokenizer.json'
    try:
        if 'tokenizer_sha256' in meta and file_sha256(file) != meta['tokenizer_sha256']:
            raise ValueError('it is not the one that made the tokens')
        for shard in tqdm(meta['train']['shards'] + meta['val']['shards'], 'checking', disable=None, leave=False):
            file = folder / shard['name']
            info = file.stat()
            stamp = f'{file.name} {info.st_size} {info.st_mtime_ns} {info.st_ino}'      # a copy has another inode
            if stamp not in known:
                known[stamp] = check_shard(file, meta['dtype'], meta['vocab_size'])
                with suppress(OSError):     # a folder that cannot be written to is checked every time
                    cache.write_text(json.dumps(known))
            found = known[stamp]
            if not shard.items() <= found.items():      # meta.json says something else
                raise ValueError('it is not the one that meta.json describes')
            shard.update(found)
    except (OSError, ValueError) as e:
        raise UserError(f'cannot train on {folder} ({file.name}: {e}): copy it here again, or remove it and prepare it '
                        f'again')
    return meta

def check_shard(path, dtype, vocab_size):
    """The entry of a shard in meta.json. Raises ValueError if an id is outside the vocabulary."""
    ids = np.memmap(path, dtype, 'r')
    if ids.max() >= vocab_size:
        raise ValueError(f'it has the id {ids.max()}, but the vocabulary has {vocab_size:,} tokens')
    return dict(name=path.name, tokens=len(ids), sha256=file_sha256(path))

def data_hash(meta):
    """Eight hex digits that identify the tokens of both splits."""
    shas = [shard['sha256'] for shard in meta['train']['shards'] + meta['val']['shards']]
    return joint_sha256(shas)[:8]

class Shards:
    """The shards of a split, read as one long array of tokens. tok: their tokenizer, if it is known."""
    def __init__(self, folder, split, meta, tok=None):
        self.meta, self.tok = meta[split], tok
        shards = self.meta['shards']
        self.files = [open(folder / shard['name'], 'rb', buffering=0) for shard in shards]
        self.shard_starts = [0, *accumulate(shard['tokens'] for shard in shards)]
        self.dtype = np.dtype(meta['dtype'])

    def __len__(self):
        return self.shard_starts[-1]

    def known_bytes(self, starts, length):
        """Returns how many bytes the targets of these windows stand for, unknown words not counted; 0 without a tok."""
        ids = np.concatenate([self.read(start + 1, length) for start in starts])
        return len(known_text(self.tok, ids)) if self.tok else 0

    def bits_per_byte(self, nats, known_bytes):
        """
        Returns the bits per byte of a text with this loss in all, in nats; None if the bytes are not known. A word that
        the vocabulary lacks costs 8 bits a byte, and such words are taken to be as frequent as in the split.
        """
        if not known_bytes or 'bytes' not in self.meta:
            return None
        unknown = self.meta['unknown_bytes'] / self.meta['bytes']       # as a share of all bytes
        return (1 - unknown) * nats / math.log(2) / known_bytes + unknown * 8

    def read(self, start, length):
        """tokens[start : start + length], across shards."""
        i = bisect_right(self.shard_starts, start) - 1
        file = self.files[i]
        width = self.dtype.itemsize
        # a memmap is half as fast, and kills the process if a file has become shorter
        file.seek((start - self.shard_starts[i]) * width)
        tokens = np.frombuffer(file.read(length * width), self.dtype)
        if len(tokens) < length:        # the rest is in the next shard
            tokens = np.append(tokens, self.read(start + len(tokens), length - len(tokens)))
        return tokens

    def starts(self, first, count, T, seed):
        """
        Where the sequences `first`, `first` + 1, ... begin; epochs follow each other without end. A pure function of
        seed and number: there is no loader state to save.
        """
        n = (len(self) - T) // T        # sequences per epoch: T tokens are left over for an offset and the last target
        return [int(epoch_order(seed, i // n, n, T)[i % n]) for i in range(first, first + count)]

    def batch(self, starts, T, place='cpu'):
        """The sequences at the given positions -> idx, targets (B, T) int64 on a device, views of one tensor."""
        import torch        # not needed to prepare data
        x = torch.from_numpy(np.array([self.read(start, T + 1) for start in starts], np.int64))
        if 'cuda' in place:
            x = x.pin_memory()
        x = x.to(place, non_blocking='cuda' in place)
        return x[:, :-1], x[:, 1:]

@lru_cache(maxsize=8)       # two epochs of a few data sets
def epoch_order(seed, epoch, n, T):
    """
    The starts of an epoch: every non-overlapping sequence of T tokens once. Their order and a common offset depend on
    (seed, epoch) alone. Raw words of Philox are the same in every version of numpy.
    """
    words = np.random.Philox(key=[seed, epoch]).random_raw(n + 1)
    return np.argsort(words[1:], kind='stable') * T + int(words[0]) % T         # numpy 1 divides words[0] in float64

# -----------------------------------------------------------------------------

def main():
    folder = find_or_prepare(dataset, tokenizer, vocab_size)
    print(f'ready: {folder}')
    return folder

if __name__ == '__main__':
    launch(main)
