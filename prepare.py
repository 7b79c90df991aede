"""
Turns raw text into token shards that train.py reads.

    python prepare.py                                            # the Python standard library, BPE of 4,096
    python prepare.py --dataset=names --tokenizer=char
    python prepare.py --dataset=tinystories --vocab_size=10000
    python prepare.py --dataset=path/to/my_text.txt              # a file (.txt, .jsonl, also .gz .xz .zst) or a folder
    python prepare.py --compare=data/names-bpe4096/tokenizer.json      # and what a tokenizer of other text loses on it

It writes data/<name>-<tokenizer><vocab_size>/ with train_000.bin, ..., val_000.bin (headerless uint16), meta.json and
tokenizer.json, and ends with a summary. train.py calls it by itself when the data it wants is missing.
"""
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import regex
from tqdm import tqdm

from configurator import (BLOCK, UserError, check_ranges, configure, default_workers, download, file_sha256, launch, lock, open_file,
                          parallel_map, peak_memory, read_blocks, read_json, stamps, sync, unlock, visible, write_whole)
from tokenizer import (END_OF_TEXT, PATTERNS, ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer, add_counts,
                       check_vocab_size, count_words, load_tokenizer, merge_words)

# -----------------------------------------------------------------------------
dataset = 'python'          # python, tinystories, openwebtext, fineweb_edu, shakespeare, names, or any path
tokenizer = 'bpe'           # bpe, char, byte, word, gpt2, or the path of a tokenizer.json
vocab_size = 4096           # of bpe and word, all tokens counted
pattern = 'gpt2'            # how bpe cuts text into words: gpt2 or gpt4
val_fraction = 0.0          # share of the documents held out for validation; 0: the data set's own, else 0.1
separator = END_OF_TEXT     # stands between the documents of a text file; \\n: every line is one
text_field = 'text'         # the field of a .jsonl line (or the column of a .parquet file) that holds the text
shard_tokens = 100_000_000  # tokens per .bin file
workers = 0                 # processes; 0: one per core
compare = ''                # the tokenizer.json of another data folder to compare with
# -----------------------------------------------------------------------------
config = configure(globals())

HUB = 'https://huggingface.co/datasets/'
GITHUB = 'https://raw.githubusercontent.com/karpathy/'
DATASETS = {    # urls of training files; of validation files, if they come apart; how documents are told apart; what
                # text that is shown during training begins with
    'python': dict(start='def'),
    'tinystories': dict(train=[HUB + 'roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt'],
                        val=[HUB + 'roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-valid.txt']),
    'openwebtext': dict(train=[HUB + 'stanford-cs336/owt-sample/resolve/main/owt_train.txt.gz'],
                        val=[HUB + 'stanford-cs336/owt-sample/resolve/main/owt_valid.txt.gz']),
    'fineweb_edu': dict(train=[HUB + f'HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT/{i:03d}_00000.parquet'
                               for i in range(14)], val_fraction=0.001),
    'shakespeare': dict(train=[GITHUB + 'char-rnn/master/data/tinyshakespeare/input.txt'], as_name='tinyshakespeare.txt',
                        sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'),
    'names': dict(train=[GITHUB + 'makemore/master/names.txt'], separator='\n',
                  sha256='0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d'),
}
TOKENIZERS = ('bpe', 'char', 'byte', 'word', 'gpt2')
GPT2_MODELS = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
GPT2_FILES = {  # url: sha256
    'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json':
        '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783',
    'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe':
        '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',
}
DOWNLOADS = Path('data/downloads')
SAMPLE = 1 << 20    # bytes of each split that the summary looks at

# -----------------------------------------------------------------------------
# where the text comes from

def standard_library():
    """The .py files of the running interpreter, without tests, installed packages, tables and prose."""
    root = Path(sysconfig.get_paths()['stdlib'])
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'encodings', 'pydoc_data'}
    files = [p for p in root.rglob('*.py') if not skip & set(p.relative_to(root).parts)]
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())

def find_source(dataset):
    """
    dataset -> a dict that says where its documents are: source (text that identifies it), files (or urls of train and
    val to download), separator, val_fraction. Raises UserError if there is no such data set.
    """
    between = separator.replace('\\n', '\n')         # a command line has no easy way to give a line break
    if dataset == 'python':
        return dict(source='Python ' + sys.version.split()[0], files=standard_library(), separator='',
                    val_fraction=val_fraction or 0.1)
    if dataset in DATASETS:
        known = DATASETS[dataset]
        return dict(source=dataset, urls=known, separator=known.get('separator', between),
                    val_fraction=0.0 if 'val' in known else val_fraction or known.get('val_fraction', 0.1))
    path = Path(dataset)
    if not dataset or not os.path.exists(dataset):
        raise UserError(f'there is no data set {dataset!r}: give a path that exists, or one of {", ".join(DATASETS)}')
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob('*') if p.is_file() and '/.' not in '/' + p.relative_to(path).as_posix())
        if not files:
            raise UserError(f'the folder {dataset} holds no files: give one with text in it')
    inside = path.resolve().is_relative_to(Path.cwd())        # so that a project can be moved with its data
    source = path.resolve().relative_to(Path.cwd()) if inside else path.resolve()
    return dict(source=source.as_posix(), source_bytes=sum(size for size, *_ in stamps(files)), files=files,
                separator=between, val_fraction=val_fraction or 0.1)

def fetch(source):
    """What find_source found, downloaded where it is missing: -> (training files, validation files)"""
    if 'urls' not in source:
        return source['files'], []
    urls = source['urls']
    return [[download(url, DOWNLOADS / urls.get('as_name', url.split('/')[-1]), urls.get('sha256'))
             for url in urls.get(split, [])] for split in ('train', 'val')]

def data_name(dataset):
    """The name of a data set, or the stem of a path: data_name('texts/books.txt.xz') -> 'books'"""
    if dataset in DATASETS:
        return dataset
    name = Path(dataset).resolve().name
    return ''.join(c if c.isalnum() or c in '-_' else '_' for c in name.split('.')[0]) or 'data'

def data_folder(dataset, tokenizer, vocab_size):
    """Where the shards of a data set lie: data_folder('names', 'char', 0) -> Path('data/names-char')"""
    kind = f'{tokenizer}{vocab_size}' if tokenizer in ('bpe', 'word') else tokenizer
    if tokenizer not in TOKENIZERS:
        kind = 'tok' + file_sha256(tokenizer)[:8]
    return Path('data') / f'{data_name(dataset)}-{kind}'

def documents(files, separator, skip_undecodable=False):
    """
    Yields (text, ends): the documents of the files in order as UTF-8 bytes, long ones in parts of about BLOCK bytes;
    `ends` says that the document is over. Raises UserError for a file that can not be read as text.
    """
    for path in files:
        name = path.name.lower()
        try:
            if name.endswith('.parquet'):
                for text in parquet_texts(path):
                    yield text, True
            elif '.jsonl' in name:
                with open_file(path) as f:
                    for i, line in enumerate(io.TextIOWrapper(f, 'utf-8-sig'), 1):
                        if line.strip():
                            yield json_text(line, path, i), True
            elif skip_undecodable:
                with suppress(UnicodeDecodeError):
                    (text := path.read_bytes()).decode()
                    yield text, True
            else:
                with open_file(path) as f:
                    rest = b''
                    for block in read_blocks(f, path, [separator]):
                        if rest:
                            yield rest, False
                        *whole, rest = block.split(separator.encode())
                        for text in whole:
                            yield text, True
                    yield rest, True
        except UnicodeDecodeError as e:
            raise UserError(f'{path} is not UTF-8 ({e.reason}); convert it first, for example with iconv -t utf-8')
        except Exception as e:
            known = isinstance(e, (EOFError, lzma.LZMAError, zlib.error, OSError))
            if not known and type(e).__name__ != 'ZstdError':       # of a package that may not be there
                raise
            raise UserError(f'can not read {path}: {getattr(e, "strerror", None) or e}; check the file')

def json_text(line, path, number):
    try:
        return json.loads(line)[text_field].encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise UserError(f'{path}, line {number}: no text under {text_field!r} ({type(e).__name__}); '
                        f'name the field with --text_field=')

def parquet_texts(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f'{path} needs the package pyarrow: pip install pyarrow')
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise ValueError(f'{text_field} holds no text')
                yield (text or '').encode()
    except (pyarrow.ArrowException, IndexError, ValueError) as e:
        raise UserError(f'can not read {path}: {e}; name the column with --text_field=')

# -----------------------------------------------------------------------------
# the validation split

def document_hash(text):
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), 'big') / 2 ** 64

def without_blank(docs):
    """Leaves documents of white space alone out."""
    start = True
    for text, ends in docs:
        if not (start and ends and not text.strip()):
            yield text, ends
            start = ends

def survey(docs, val_fraction):
    """
    How to split: (threshold, 0): documents whose hash is below it are for validation; or, where there are fewer than
    20 documents, (0, cut): text from that character on is (as nanoGPT splits). Reads no further than it must.
    """
    count, chars, lowest, start = 0, 0, 1.0, True
    for text, ends in docs:
        chars += len(text.decode())
        if start and text:
            lowest = min(lowest, document_hash(text))
        start = ends
        count += ends
        if count == 1000:       # enough to be sure that some document falls on each side
            break
    if not chars:
        raise UserError('the data holds no text: give a file with something in it')
    if count >= 20:
        return max(val_fraction, lowest + 1e-12), 0
    return 0, int(chars * (1 - val_fraction))

def split_documents(docs, threshold, cut):
    """(text, ends) -> (split, text, ends), by the numbers of survey."""
    start, seen, split = True, 0, 'train'
    for text, ends in docs:
        if cut:         # by position: a part that crosses it is cut in two
            text = text.decode()
            left, seen = text[:max(cut - seen, 0)], seen + len(text)
            if left:
                yield 'train', left.encode(), ends and len(left) == len(text)
            if len(left) < len(text) or not text:
                yield 'val' if seen >= cut else 'train', text[len(left):].encode(), ends
        else:
            if start:
                split = 'val' if document_hash(text) < threshold else 'train'
            yield split, text, ends
        start = ends

def in_batches(labelled):
    """Groups (split, text, ends) into lists of about BLOCK bytes."""
    batch, size = [], 0
    for item in labelled:
        batch.append(item)
        size += len(item[1])
        if size >= BLOCK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

def keep_sample(batches, sample):
    """Passes batches through; from the first ones puts SAMPLE bytes of each split, or some more, into `sample`."""
    size = dict.fromkeys(sample, 0)
    for batch in batches:
        for split in [split for split in size if size[split] < SAMPLE]:
            part = [item for item in batch if item[0] == split]
            sample[split] += part
            size[split] += sum(len(text) for _, text, _ in part)
        yield batch

def beginning(items, size):
    """The first `size` bytes of a list of (split, text, ends)."""
    out = []
    for split, text, ends in items:
        if size <= 0:
            break
        out.append((split, text[:size].decode(errors='ignore').encode(), ends))
        size -= len(text)
    return out

# -----------------------------------------------------------------------------
# tokens

class count_batch:
    """A picklable function: batch -> the Counter of its words or characters; for BPE what add_counts adds up."""

    def __init__(self, tokenizer):
        self.count = count_words(pattern) if tokenizer == 'bpe' else None
        self.split = None if tokenizer == 'char' else 'train'           # the alphabet is that of all the data
        self.findall = regex.compile(WordTokenizer.pattern_text).findall if tokenizer == 'word' else str

    def __call__(self, batch):
        batch = [(text, ends) for split, text, ends in batch if split == self.split or not self.split]
        if self.count:
            return self.count(join_documents(batch))
        return Counter(chain.from_iterable(self.findall(text.decode()) for text, _ in batch))

def join_documents(batch):
    """[(text, ends)] -> the texts in one, with the byte 0xff, which UTF-8 never has, at the end of each document"""
    return b''.join([text + b'\xff' * ends for text, ends in batch])

class encode_batch:
    """A picklable function: batch -> {split: (ids, documents, bytes, bytes in unknown words, the distinct ids)}"""

    def __init__(self, tok):
        self.tok, self.unknown = tok, getattr(tok, 'unknown', None)

    def __call__(self, batch):
        out = {}
        for which in ('train', 'val'):
            part = [(text, ends) for split, text, ends in batch if split == which]
            ids = self.tok.encode_bytes(join_documents(part), self.tok.eot)
            docs, size, lost = sum(ends for _, ends in part), sum(len(text) for text, _ in part), 0
            if self.unknown is not None and self.unknown in ids:
                lost = size - int(self.tok.token_bytes.size[ids[(ids != self.unknown) & (ids != self.tok.eot)]].sum())
            distinct = np.flatnonzero(np.bincount(ids))     # np.unique takes eight times as long
            out[which] = ids, docs, size, lost, distinct
        return out

class ShardWriter:
    """Writes ids as <split>_000.bin, <split>_001.bin, ... of at most `limit` tokens each, and hashes them."""

    def __init__(self, folder, split, dtype, limit):
        self.folder, self.split, self.dtype, self.limit = folder, split, dtype, limit
        self.file, self.shards, self.tokens = None, [], 0

    def write(self, ids):
        while len(ids):
            if self.file is None:
                self.name = f'{self.split}_{len(self.shards):03d}.bin'
                self.file, self.hash, self.count = open(self.folder / self.name, 'wb'), hashlib.sha256(), 0
            part = ids[:self.limit - self.count]
            data = part.astype(self.dtype, copy=False)
            if (data != part).any():        # numpy cuts a number that is too large without a word
                raise ValueError(f'an id up to {part.max()} does not fit {self.dtype}')
            self.file.write(data)
            self.hash.update(data)
            self.count += len(part)
            self.tokens += len(part)
            ids = ids[len(part):]
            if self.count == self.limit:
                self.close()

    def close(self):
        if self.file:
            self.file.close()
            sync(self.folder / self.name)
            self.shards.append(dict(name=self.name, tokens=self.count, sha256=self.hash.hexdigest()))
            self.file = None

class Shards:
    """The shards of a split, read as one long array of tokens."""

    def __init__(self, folder, split, meta):
        shards, self.dtype = meta[split]['shards'], np.dtype(meta['dtype'])
        try:
            self.files = [open(Path(folder) / s['name'], 'rb', buffering=0) for s in shards]
        except OSError as e:
            raise UserError(f'can not read the {split} shards in {folder}: {e}; remove the folder to prepare it again')
        self.starts = np.cumsum([0] + [os.fstat(f.fileno()).st_size // self.dtype.itemsize for f in self.files])

    def __len__(self):
        return int(self.starts[-1])

    def read(self, start, length):
        """tokens[start : start + length], across shards. Raises UserError where a file has become shorter."""
        i, out, width = int(np.searchsorted(self.starts, start, 'right')) - 1, [], self.dtype.itemsize
        while length:       # a memmap is half as fast, and kills the process where a file has become shorter
            n, at, f = min(length, int(self.starts[i + 1]) - start), (start - int(self.starts[i])) * width, self.files[i]
            data = os.pread(f.fileno(), n * width, at) if hasattr(os, 'pread') else (f.seek(at), f.read(n * width))[1]
            if len(data) < n * width:
                raise UserError(f'{f.name} has become shorter while it is read: put it back, or prepare it again')
            out.append(np.frombuffer(data, self.dtype))
            start, length, i = start + n, length - n, i + 1
        return out[0] if len(out) == 1 else np.concatenate(out)

    def batch(self, starts, T, place='cpu'):
        """idx, targets (B, T) int64 on a device: the windows that begin at the given positions."""
        import torch        # preparing alone needs none
        x = torch.from_numpy(np.stack([self.read(s, T + 1) for s in starts]).astype(np.int64))
        x = x.pin_memory().to(place, non_blocking=True) if place.startswith('cuda') else x.to(place)
        return x[:, :-1], x[:, 1:]

# a batch is a pure function of (seed, step)
@lru_cache(maxsize=2)
def epoch_order(seed, epoch, n_tokens, T):
    """
    The start positions of an epoch: every non-overlapping window of T tokens once, in an order, and shifted by an
    offset, that depend on (seed, epoch) alone. Raw words of Philox are the same in every version of numpy.
    """
    n = (n_tokens - T) // T
    words = np.random.Philox(key=[seed, epoch]).random_raw(n + 1)
    return np.argsort(words[1:], kind='stable') * T + int(words[0] % T)

def window_starts(first, count, n_tokens, T, seed):
    """Start positions of windows number first, first + 1, ... of an endless sequence of epochs."""
    n = (n_tokens - T) // T
    return [int(epoch_order(seed, i // n, n_tokens, T)[i % n]) for i in range(first, first + count)]

def read_meta(folder):
    """meta.json of a data folder; what stands for it with nanoGPT's pair of train.bin and val.bin, which has none."""
    if (folder / 'meta.json').exists():
        meta = read_json(folder / 'meta.json')
        try:
            check_meta(meta)
            return dict(meta, source=visible(str(meta['source'])))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise UserError(f'can not use {folder}/meta.json ({type(e).__name__}: {e}): remove the folder to prepare it again')
    pair = {split: dict(shards=[dict(name=f'{split}.bin')]) for split in ('train', 'val')}
    return dict(source='no meta.json: taken as tokens of GPT-2 (bits per byte not known)', vocab_size=50257, eot=50256,
                dtype='<u2', **pair)

def check_meta(meta):
    """Raises ValueError, or what Python does at a wrong type, where meta.json is not as prepare writes it."""
    def number(where, key, least, most=1 << 62):
        if type(where[key]) is not int or not least <= where[key] <= most:
            raise ValueError(f'{key} is {where[key]!r:.40}')
    if meta['dtype'] not in ('<u2', '<u4'):
        raise ValueError(f'dtype is {meta["dtype"]!r:.40}, not <u2 or <u4')
    number(meta, 'vocab_size', 1, 1 << (16 if meta['dtype'] == '<u2' else 24))
    number(meta, 'eot', 0, meta['vocab_size'] - 1)
    for split in (meta['train'], val := meta['val']):
        for s in split['shards']:
            number({'tokens': 1, **s}, 'tokens', 1)
            if not regex.fullmatch(r'\w[\w .-]*', s['name']) or type(s.get('sha256', '')) is not str:
                raise ValueError(f'{s["name"]!r:.40} is not the name of a file here, or its sha256 is no text')
        if not split['shards'] or 'tokens' in split and split['tokens'] != sum(s['tokens'] for s in split['shards']):
            raise ValueError('the tokens of a split are not those of its shards')
    if 'bytes' in val:
        for key, least in dict(tokens=1, bytes=1, unknown_bytes=0).items():
            number(val, key, least)
        f'{val["gzip_bpb"]:.2f} {val["xz_bpb"]:.2f}'        # as train.py will print them

def check_data(folder, meta):
    """
    Raises UserError where a shard or tokenizer.json is not the one that meta tells of, or an id is outside the vocabulary;
    checked.json remembers files that were right, while they do not change. Of several processes on a machine the first does
    it. Returns meta, where shards without a sha256 (nanoGPT's) now have one.
    """
    shards = [s for split in ('train', 'val') for s in meta[split]['shards']]
    if os.environ.get('LOCAL_RANK', '0') != '0' and all('sha256' in s for s in shards):
        return meta
    paths, tok = [folder / s['name'] for s in shards], folder / 'tokenizer.json'
    dtype, vocab_size, known, found, now = np.dtype(meta['dtype']), meta['vocab_size'], {}, {}, time.time_ns()
    with suppress(UserError):       # it is not there, or nonsense
        known = read_json(folder / 'checked.json')
    try:
        looks = stamps(paths)
        for path, s, (size, *_) in zip(paths, shards, looks):
            if size != (tokens := s.get('tokens', size // dtype.itemsize or 1)) * dtype.itemsize:
                raise ValueError(f'{path.name} has {size:,} bytes, not {tokens:,} tokens of {dtype.itemsize} bytes')
        if 'tokenizer_sha256' in meta and file_sha256(tok) != meta['tokenizer_sha256']:
            raise ValueError('tokenizer.json is not the one that made the tokens')
        total = sum(size for size, *_ in looks)
        room = tok.stat().st_size if tok.exists() else total        # nothing larger than the files is ever made for them
        if vocab_size > max(1 << 16, room) or tok.exists() and vocab_size != load_tokenizer(tok).vocab_size:
            raise ValueError(f'a vocabulary of {vocab_size:,} is not that of its tokenizer')
        with tqdm(total=total, desc='checking', unit='B', unit_scale=True, disable=None, leave=False) as bar:
            for path, s, look in zip(paths, shards, looks):
                fact = ' '.join(map(str, (path.name, dtype.str, vocab_size, *look)))
                sha = str(known.get(fact))
                if len(sha) != 64 or sha != s.get('sha256', sha):
                    sha = read_shard(path, dtype, vocab_size, bar)
                    if stamps([path]) != [look]:
                        raise ValueError(f'{path.name} changed while it was checked')
                if sha != s.setdefault('sha256', sha):
                    raise ValueError(f'the sha256 of {path.name} is not the one in meta.json')
                if now - max(look[1:3]) > 2e9:      # subtle: a clock may be too coarse to show a change just after another
                    found[fact] = sha
    except (OSError, ValueError) as e:
        raise UserError(f'can not train on {folder} ({e}): copy it here again, or remove it and prepare it again')
    if found != known:
        with suppress(OSError):     # a folder that can not be written to is checked every time
            write_whole(folder / 'checked.json', json.dumps(found, indent=1))
    return meta

def read_shard(path, dtype, vocab_size, bar):
    """-> sha256. Raises ValueError for the first id that is outside the vocabulary."""
    digest, seen = hashlib.sha256(), 0
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            digest.update(block)
            ids = np.frombuffer(block, dtype)
            if ids.max() >= vocab_size:
                i = int((ids >= vocab_size).argmax())
                raise ValueError(f'token {seen + i:,} of {path.name} is {ids[i]:,}, and the vocabulary has {vocab_size:,}')
            seen += len(ids)
            bar.update(len(block))
    return digest.hexdigest()

def data_hash(meta):
    """Eight hex digits that stand for the tokens of both splits."""
    shas = [s.get('sha256', '') for split in ('train', 'val') for s in meta[split]['shards']]
    return hashlib.sha256(''.join(shas).encode()).hexdigest()[:8]

def bits_per_byte(loss, meta):
    """
    Nats per token -> bits per byte of the validation text, in which a word that the vocabulary lacks costs its bytes.
    None where the bytes are not known, which is so without a meta.json.
    """
    val = meta['val']
    if 'bytes' not in val:
        return None
    return (loss * val['tokens'] / math.log(2) + 8 * val['unknown_bytes']) / val['bytes']

def gpt2_tokenizer():
    """GPT-2's own vocabulary, from the files of its release (downloaded once)."""
    paths = [download(url, DOWNLOADS / ('gpt2-' + url.split('/')[-1]), sha) for url, sha in GPT2_FILES.items()]
    return Tokenizer.from_files(*paths, [END_OF_TEXT])

def gpt2_weights(name):
    """The folder of GPT-2's released weights, by one of the names in GPT2_MODELS (downloaded once)."""
    for file in ('config.json', 'model.safetensors'):
        download(f'https://huggingface.co/openai-community/{name}/resolve/main/{file}', DOWNLOADS / name / file)
    return DOWNLOADS / name

def make_tokenizer(kind, vocab_size, counts, progress):
    """Trains (from the counts of count_batch) or opens a tokenizer; counts is None where nothing is to be trained."""
    if kind == 'byte':
        return ByteTokenizer()
    if kind == 'gpt2':
        return gpt2_tokenizer()
    if kind == 'char':
        return CharTokenizer(sorted(counts))
    if kind == 'word':          # the most frequent ones, without <unk> and the end of a text
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return WordTokenizer(words[:max(vocab_size - 2, 0)] if vocab_size else words)
    if kind == 'bpe':
        return Tokenizer(*merge_words(counts, vocab_size, [END_OF_TEXT], progress), [END_OF_TEXT], pattern)
    return open_tokenizer(kind)

def open_tokenizer(path):
    tok = load_tokenizer(path)
    if tok.eot is None:
        raise UserError(f'{path} has no {END_OF_TEXT} token, which ends a document here; add it to the file')
    return tok

# -----------------------------------------------------------------------------

class Stopwatch(dict):
    """Seconds per phase: `for x in watch.through('reading', items)` counts the time spent inside items."""

    def through(self, phase, items):
        items = iter(items)
        while True:
            t = time.perf_counter()
            item = next(items, None)
            self[phase] = self.get(phase, 0) + time.perf_counter() - t
            if item is None:
                return
            yield item

def find_or_prepare(dataset, tokenizer='bpe', vocab_size=4096):
    """
    The folder of a data set, or dataset itself where it is one. Under torchrun rank 0 prepares and the others wait for it.
    """
    if any((Path(dataset) / name).exists() for name in ('meta.json', 'train.bin')):
        return Path(dataset)
    if os.environ.get('RANK', '0') == '0':
        return prepare(dataset, tokenizer, vocab_size)
    folder = data_folder(dataset, tokenizer, vocab_size)
    if not folder.exists():
        print(f'rank {os.environ["RANK"]} waits until rank 0 has prepared {folder}', flush=True)
    while not (folder / 'meta.json').exists():      # torchrun ends this process if rank 0 fails
        time.sleep(0.5)
    return folder

def prepare(dataset, tokenizer='bpe', vocab_size=4096):
    """
    Makes the data folder of a data set, if it is not there, and returns its path.

    The folder appears under its name only when it is whole. Raises UserError for data that can not be read, and where
    the folder holds something else than what is asked for.
    """
    if tokenizer not in TOKENIZERS and not os.path.isfile(tokenizer):
        raise UserError(f'there is no tokenizer {tokenizer!r}: give one of {", ".join(TOKENIZERS)}, or the path of a '
                        f'tokenizer.json')
    check_ranges(config, (0, 1024, 'workers'))
    if not 0 <= val_fraction < 1:
        raise UserError(f'val_fraction {val_fraction} is no share: give a number from 0 to 1, such as 0.1')
    if pattern not in PATTERNS:
        raise UserError(f'there is no pattern {pattern!r}: give one of {", ".join(PATTERNS)}')
    if shard_tokens < 1 or not separator:
        raise UserError('shard_tokens must be 1 or more and separator not empty; leave them out for the defaults')
    if tokenizer == 'bpe':
        check_vocab_size(vocab_size, [END_OF_TEXT])
    elif tokenizer == 'word' and vocab_size < 3:
        raise UserError(f'vocab_size {vocab_size} leaves no room for a word: give 3 or more')

    folder = data_folder(dataset, tokenizer, vocab_size)
    src = find_source(dataset)
    settings = dict(source=src['source'], source_bytes=src.get('source_bytes', 0), val_fraction=src['val_fraction'],
                    separator=src['separator'], text_field=text_field, pattern=pattern)
    if not folder.exists():
        partial, guard = (folder.with_name(f'.{folder.name}.{end}') for end in ('partial', 'lock'))
        lock(guard, f'another process is preparing {folder}: wait for it, or stop it')
        try:
            if not folder.exists():     # else the other process ended at this moment
                return make_folder(folder, partial, src, settings, dataset, tokenizer, vocab_size)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            unlock(guard)
    check_same(folder, settings)
    return folder

def make_folder(folder, partial, src, settings, dataset, tokenizer, vocab_size):
    """Makes a data folder under the name `partial`, renames it when it is whole and on the disk, and prints the summary."""
    files, val_files = fetch(src)
    before = stamps([*files, *val_files])
    start, watch, n_workers = time.perf_counter(), Stopwatch(), workers or default_workers()
    files_bytes = sum(size for size, *_ in before)
    print(f'preparing {src["source"]}: {len(files) + len(val_files)} files, {files_bytes / 1e6:,.1f} MB -> {folder}')
    read = lambda paths: without_blank(documents(paths, src['separator'], skip_undecodable=dataset == 'python'))
    # of two kinds of files all of one and all of the other
    splits = [(files, 0, 0), (val_files, 1, 0)] if val_files else [(files, *survey(read(files), src['val_fraction']))]

    def labelled():
        for paths, threshold, cut in splits:
            yield from split_documents(watch.through('reading', read(paths)), threshold, cut)

    counts = None
    if tokenizer in ('bpe', 'word', 'char'):
        t, counts = time.perf_counter(), Counter()
        counted = parallel_map(count_batch(tokenizer), in_batches(labelled()), n_workers)
        if tokenizer == 'bpe':
            counts = add_counts(counted, pattern)
        else:
            for c in counted:
                counts.update(c)
        watch['pre-tokenizing'] = time.perf_counter() - t - watch.get('reading', 0)
    read_once, t = watch.get('reading', 0), time.perf_counter()
    with tqdm(total=vocab_size - 257, desc='merging', unit=' merges', disable=None, leave=False) as bar:
        tok = make_tokenizer(tokenizer, vocab_size, counts, bar.update)
    watch['merging'] = time.perf_counter() - t

    t = time.perf_counter()
    shutil.rmtree(partial, ignore_errors=True)      # of a process that was killed
    partial.mkdir()
    dtype = np.dtype(tok.dtype).newbyteorder('<').str
    writers = {split: ShardWriter(partial, split, dtype, shard_tokens) for split in ('train', 'val')}
    total, sample = {split: Counter() for split in writers}, {split: [] for split in writers}
    seen = {split: np.zeros(tok.vocab_size, bool) for split in writers}
    with tqdm(total=files_bytes, desc='encoding', unit='B', unit_scale=True, disable=None, leave=False) as bar:
        for out in parallel_map(encode_batch(tok), keep_sample(in_batches(labelled()), sample), n_workers):
            for split, (ids, docs, size, unknown, distinct) in out.items():
                writers[split].write(ids)
                total[split].update(documents=docs, bytes=size, unknown_bytes=unknown)
                seen[split][distinct] = True
                bar.update(size)
    for path, then, now in zip([*files, *val_files], before, stamps([*files, *val_files])):
        if then[:2] != now[:2]:
            raise UserError(f'{path} changed while it was read: run this again when it stays as it is')
    meta = dict(dataset=data_name(dataset), **settings, tokenizer=tokenizer, vocab_size=tok.vocab_size, dtype=dtype, eot=tok.eot)
    for split, writer in writers.items():
        writer.close()
        if not writer.tokens:
            raise UserError(f'the {split} split is empty: give more text, or another --val_fraction')
        used = int(seen[split][[*ordinary(tok)]].sum())
        meta[split] = dict(total[split], tokens=writer.tokens, used=used, shards=writer.shards)
    encoded = time.perf_counter()
    val_text = b''.join(text for _, text, _ in sample['val'])
    with ThreadPoolExecutor(1) as beside:       # xz takes as long as all the rest of the summary
        xz = beside.submit(lzma.compress, val_text, preset=9)
        # what a general compressor needs for the same text, to print beside the model's bits per byte
        meta['val']['gzip_bpb'] = 8 * len(gzip.compress(val_text, 9)) / len(val_text)
        kinds = four_kinds(tok, sample, vocab_size)
        meta['val']['xz_bpb'] = 8 * len(xz.result()) / len(val_text)
    tok.save(partial / 'tokenizer.json')
    meta['tokenizer_sha256'] = file_sha256(partial / 'tokenizer.json')
    sync(partial / 'tokenizer.json')
    write_whole(partial / 'meta.json', json.dumps(meta, indent=1))
    os.replace(partial, folder)
    sync(folder.parent)
    watch['encoding'] = encoded - t - (watch['reading'] - read_once)
    print_summary(folder, meta, tok, watch, time.perf_counter() - start, encoded - t, *kinds)
    return folder

def check_same(folder, settings):
    """Raises UserError if a data folder was made from something else than these settings."""
    meta = read_json(folder / 'meta.json')
    for k, v in settings.items():
        if meta.get(k) != v:
            raise UserError(f'{folder} was made with {k} = {meta.get(k)!r}, not {v!r}: remove it to make it again, or '
                            f'train on it as it is with --dataset={folder}')

# -----------------------------------------------------------------------------
# the summary

def ordinary(tok):
    """The vocabulary without special tokens and <unk>."""
    special = {*tok.special_ids.values(), getattr(tok, 'unknown', None)}
    return {i: b for i, b in tok.vocab.items() if i not in special}

def shown(token):
    """A token between quotes; what is no whole character becomes U+FFFD, a long token is cut: 'xxxx...' (99 bytes)"""
    text = repr(token.decode(errors='replace'))
    return text if len(text) <= 32 else f"{text[:16]}...' ({len(token)} bytes)"

def print_summary(folder, meta, tok, watch, seconds, encoding, tried_on, kinds):
    """encoding: the seconds of the pass that encodes, with its reading; tried_on, kinds: what four_kinds returns"""
    for split in ('train', 'val'):
        m = meta[split]
        print(f'{split:14} | {m["documents"]:,} documents | {m["bytes"]:,} bytes | {m["tokens"]:,} tokens | '
              f'{m["bytes"] / m["tokens"]:.2f} bytes per token'
              + (f' | {m["unknown_bytes"] / m["bytes"]:.2%} of the bytes unknown' if m['unknown_bytes'] else ''))
    size = meta['train']['bytes'] + meta['val']['bytes']
    for phase, s in watch.items():
        rate = '' if phase == 'merging' else f' | {size / 1e6 / max(s, 1e-9):.1f} MB/s'
        print(f'{phase:14} | {s:.2f} s{rate}')
    own, worker = peak_memory()
    print(f'{"all":14} | {seconds:.2f} s | {size / 1e6 / seconds:.1f} MB/s' + (f' | peak memory {own / 1e6:.0f} MB' if own else '')
          + (f' and {worker / 1e6:.0f} MB per worker' if worker else ''))
    vocab, hours = ordinary(tok), 825e9 / size * encoding / 3600
    print(f'The Pile       | 825 GB would take {hours:,.1f} hours to read and encode on this machine'
          + ('; a long text goes faster' if size < 1e8 else ''))
    foreign, n = sum(not b.isascii() for b in vocab.values()), max(len(vocab), 1)
    print(f'vocabulary     | {len(vocab):,} tokens and {len(tok.vocab) - len(vocab)} special | '
          f'{foreign / n:.1%} not ASCII | {meta["train"]["used"] / n:.1%} used in train')
    print('longest tokens | ' + ' '.join(map(shown, sorted(vocab.values(), key=len)[:-6:-1])))
    if merges := getattr(tok, 'merges', ()):
        print('last merges    | ' + ', '.join(f'{shown(a)} + {shown(b)}' for a, b in merges[-5:]))
    print(f'side by side   | {tried_on}')
    for kind, tokens, rate, lost in kinds:
        print(f'{kind:14} | {tokens:7,} tokens | {rate:.2f} bytes per token | {lost:7.2%} of the bytes unknown')
    print(f'wrote {folder}: train on it with `python train.py --dataset={folder}`')

def measure(tok, items):
    """-> (bytes per token, share of the bytes in unknown words) of [('val', text, ends)]; an end counts as a token"""
    ids, _, size, lost, _ = encode_batch(tok)(items)['val']
    return size / max(len(ids), 1), lost / max(size, 1)

def kind_of(tok):
    if isinstance(tok, WordTokenizer):
        return 'char' if isinstance(tok, CharTokenizer) else 'word'
    return 'bpe' if tok.merges else 'byte'

def four_kinds(tok, sample, vocab_size):
    """
    The kinds of tokenizers side by side on the beginning of the validation split: the one at hand, and of char, word
    and byte the others. Those learn from the beginning of the training split, which costs little; word gets as many
    tokens as BPE. -> (what they were tried on, [(kind, tokens, bytes per token, share of the bytes in unknown words)])
    """
    train, val = beginning(sample['train'], SAMPLE), beginning(sample['val'], SAMPLE // 2)
    at_hand, kinds = kind_of(tok), dict.fromkeys(('char', 'word', 'byte'))
    kinds[at_hand] = tok
    for kind in kinds.keys() - {at_hand}:
        counts = None if kind == 'byte' else count_batch(kind)(train)
        kinds[kind] = make_tokenizer(kind, tok.vocab_size if at_hand == 'bpe' else max(vocab_size, 3), counts, None)
    known, tried = (sum(len(text) for _, text, _ in items) / 1e3 for items in (train, val))
    learned = ' and '.join(kind for kind in ('char', 'word') if kind != at_hand)
    return (f'the first {tried:,.0f} kB of val; {learned} learned from the first {known:,.0f} kB of train',
            [(kind, len(one.vocab), *measure(one, val)) for kind, one in kinds.items()])

def open_other(path):
    """Opens a tokenizer to compare with. -> (path, tokenizer, val_sample of its folder, None where that holds none)"""
    tok, folder = open_tokenizer(path), Path(path).parent
    there = (folder / 'meta.json').exists() and any(folder.glob('val*.bin'))
    return path, tok, val_sample(folder, tok) if there else None

def val_sample(folder, tok):
    """[('val', text, ends)]: up to SAMPLE bytes of the validation split of a data folder, without unknown words"""
    try:
        shards = Shards(folder, 'val', read_meta(folder))
        ids = shards.read(0, min(len(shards), SAMPLE))
        text = tok.decode_bytes(ids[ids != getattr(tok, 'unknown', -1)])[:SAMPLE].decode(errors='ignore')
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(f'can not read the val shards in {folder} with its tokenizer.json ({e}); make the folder again')
    *whole, rest = text.split(END_OF_TEXT)
    return [('val', text.encode(), True) for text in whole] + [('val', rest.encode(), False)]

def print_comparison(folder, path, other, other_sample):
    """What each of two tokenizers loses on the text of the other: bytes per token."""
    own = load_tokenizer(folder / 'tokenizer.json')
    print(f'compared       | ours {len(own.vocab):,} tokens | theirs {len(other.vocab):,} tokens, {path}')
    tok = dict(ours=own, theirs=other)
    for name, home, guest, sample in (('our val', 'ours', 'theirs', val_sample(folder, own)),
                                      ('their val', 'theirs', 'ours', other_sample)):
        if not any(text for _, text, _ in sample or ()):
            continue        # their folder holds no validation split, or no word of this one is known
        (best, _), (rate, lost) = measure(tok[home], sample), measure(tok[guest], sample)
        print(f'{name:14} | {best:.2f} bytes per token with {home} | {rate:.2f} with {guest} | {guest} '
              f'{"loses" if rate <= best else "gains"} {abs(1 - rate / best):.1%}'
              + (f' | {lost:.2%} of the bytes unknown' if lost else '')
              + (f' | without the words unknown to {home}' if kind_of(tok[home]) == 'word' else ''))

def main():
    other = open_other(compare) if compare else None        # before the work, which may be long
    folder = prepare(dataset, tokenizer, vocab_size)
    if other:
        print_comparison(folder, *other)
    print(f'ready: {folder}')
    return folder

if __name__ == '__main__':
    launch(main)
