"""
Turns raw text into token shards that train.py reads.

    python prepare.py                                            # the Python standard library, BPE of 4,096
    python prepare.py --dataset=tinystories --vocab_size=10000
    python prepare.py --dataset=my_text.txt                      # a text file (or .gz, .xz, .bz2, .zst), or a folder
    python prepare.py --dataset="code/**/*.py" --separator=      # files by a pattern, one document each
    python prepare.py --dataset=posts.jsonl --text_field=body    # rows: .jsonl, .ndjson, .json, .csv, .tsv, .parquet

It writes data/<name>-<tokenizer>-<hash>/ with train_000.bin, ..., val_000.bin (headerless uint16; uint32 if the
vocabulary is above 65,536), meta.json and tokenizer.json, and prints a summary. The folder is a cache: a change
of an option, or of a file's path, size or time, makes a new one.

In the folder or pattern of --dataset, the last of the words train, val (or valid, validation, dev) and test in a file's
path below the folder says what it is for. Test files are left out, and files without such a word are training text.
Hidden files, README* and LICENSE* are skipped, and ** does not follow links to folders. Nothing else is guessed:
backups (a.txt~), copies and Git LFS pointers are kept, and files with a suffix other than those for rows are read as
text.
"""
import codecs
import csv
import hashlib
import io
import json
import os
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from configurator import (UserError, configure, count, file_sha256, launch, lock, new_folder, read_json, visible,
                          write_json)
from tokenizer import (BLOCK, BYTES, END_OF_TEXT, CharTokenizer, Tokenizer, WordTokenizer, check_vocab_size,
                       count_words, encode_batch, load_tokenizer, merge_words, parallel_map, read_blocks)

# -----------------------------------------------------------------------------
dataset = 'python'          # (path) a name in DATASETS, a path, a pattern such as "code/**", or a prepared folder
val_dataset = ''            # (path) file, folder or pattern with the validation text ('': part of dataset)
tokenizer = 'bpe'           # (path) bpe, char, byte, word, gpt2, or the path of a tokenizer.json. Special tokens, but
                            # for the separator, are ordinary text in documents, but single ids in sample.py's prompt
vocab_size = 4096           # (>= 1, < 1e9) of bpe and word, including bytes and special tokens: at least 257
pattern = 'gpt2'            # (gpt2 or gpt4) how bpe and word split text into words
val_fraction = 0.0          # (>= 0, < 1) share held out if no files are for validation (0: the data set's own, or 0.1)
separator = END_OF_TEXT     # text between documents: <|endoftext|> (\n: one per line; '': one per file)
text_field = 'text'         # column with the text in files of rows ('': read these files as text, too)
shard_tokens = 100_000_000  # (>= 1, < 1e15) tokens per .bin file
workers = 0                 # (>= 0, < 1e5) number of processes (0: one per core)
# -----------------------------------------------------------------------------
config = configure(globals())

# A function takes an option as a parameter if train.py or DATASETS may set another value, and reads others directly.
TOKENIZERS = ('bpe', 'char', 'byte', 'word', 'gpt2')

def check_options(tokenizer, vocab_size):
    """Raises UserError if an option's value is not valid."""
    if tokenizer not in TOKENIZERS and not os.path.isfile(tokenizer):
        raise UserError(f'tokenizer = {tokenizer!r} is unknown; use {", ".join(TOKENIZERS)}, or the path of a '
                        f'tokenizer.json, such as that of a checkpoint')
    if tokenizer in ('bpe', 'word'):
        check_vocab_size(vocab_size, [END_OF_TEXT])
    if separator in 'n nn rn t'.split():        # A shell removes an unquoted backslash
        raise UserError(f'separator = {separator!r} may have lost a \\ in the shell; quote it, as in --separator="\\n"')

def check_prepared(options):
    """Raises UserError if the data set is a folder that was prepared with another value of an option."""
    if not is_prepared(options['dataset']):
        return
    meta = read_meta(Path(options['dataset']))
    known = {name: meta.get(name) for name in config if name not in ('dataset', 'workers')}
    check_unused(options, known, options['dataset'] + ', which is prepared; leave it out, or use the text itself as '
                 '--dataset')

def check_unused(options, known, where):
    """Raises UserError if an option on the command line differs from the known value of what it cannot change."""
    for name, value in known.items():
        given = options.source.get(name, '')
        if given.startswith('--') and options[name] != value:           # not in the config.py of a run
            raise UserError(f'{given} has no effect on {where}')

# -----------------------------------------------------------------------------
# Files and their splits

DATASETS = {    # files in a repo on the Hugging Face hub or at a url
    'python': dict(source=f'Python {sys.version.split()[0]}', separator='', val_from='w'),     # its library
    'tinystories': dict(repo='roneneldan/TinyStories',
                        train=['TinyStoriesV2-GPT4-train.txt'], val=['TinyStoriesV2-GPT4-valid.txt']),
    'openwebtext': dict(repo='stanford-cs336/owt-sample', train=['owt_train.txt.gz'], val=['owt_valid.txt.gz']),
    'fineweb_edu': dict(repo='HuggingFaceFW/fineweb-edu', val_fraction=0.001,
                        train=[f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)]),
    'shakespeare': dict(url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                        train=['tinyshakespeare.txt'],
                        sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'),
    'names': dict(url='https://raw.githubusercontent.com/karpathy/makemore/master/names.txt', train=['names.txt'],
                  separator='\n', sha256='0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d'),
}
DOWNLOADS = Path('data/downloads')

def find_splits(dataset):
    """Returns the files of a data set: {'train': [...], 'val': [...], 'test': [...]}. Raises UserError."""
    splits = dict(train=[], val=[], test=[])
    if dataset in DATASETS and os.path.exists(dataset):
        print(f'{dataset} is the data set; for the file or folder with this name, use --dataset=./{dataset}')
    if dataset == 'python':
        for split, file in standard_library():
            splits[split].append(file)
    elif dataset in DATASETS:
        known = DATASETS[dataset]
        for split in splits:
            splits[split] = [fetch(name, known) for name in known.get(split, [])]
    else:
        for name, file in find_files(dataset).items():
            splits[split_of(name)].append(file)
    return splits

# Parts of the standard library that some versions or systems lack, tests, and tables
NOT_EVERYWHERE = {'test', 'tests', 'distutils', 'lib2to3', 'idlelib', 'ensurepip', 'tkinter', 'turtledemo', 'encodings',
                  'pydoc_data'}

def standard_library():
    """Yields the split and file of modules of Python's standard library, much the same in all its versions."""
    root = Path(os.__file__).parent
    for file in sorted(root.rglob('*.py'), key=Path.as_posix):
        name = file.relative_to(root)
        if Path(name.parts[0]).stem in sys.stdlib_module_names and NOT_EVERYWHERE.isdisjoint(name.parts):
            yield 'val' if name.as_posix() >= DATASETS['python']['val_from'] else 'train', file

SKIPPED = re.compile(r'(^|/)([.]|README|LICENSE)')       # hidden files, and files about the data
A_PATTERN = 'a pattern, such as --dataset="folder/**/*.txt"'
WILDCARDS = re.compile(r'[^/\\]*[*?[].*')       # the part of a pattern from its first wildcard on

def find_files(path):
    """Returns {path below root: file} for a file, a folder, or a pattern such as 'code/**/*.py'. Raises UserError."""
    files = {}
    if os.path.isdir(path):
        files = match(Path(path), '**/*')
    elif os.path.lexists(path):
        files[''] = Path(path)          # Its name does not say a split
    else:
        root = WILDCARDS.sub('', path)
        with suppress(ValueError):          # '' and '**.txt' are not patterns
            files = match(Path(root), path[len(root):])
    for file in files.values():
        if not file.is_file():
            raise UserError(f'{file} is not a file, but a pipe, a socket or a link to nothing; remove it, or leave it '
                            f'out with {A_PATTERN}')
    if not files:
        raise UserError(f'no text at {path!r}; use another path, or {", ".join(DATASETS)} (a comment in the config.py '
                        f'of a run names its text; its paths begin in the folder where the run was started, not in '
                        f'{os.getcwd()})')
    kinds = {has_rows(file): name for name, file in files.items()}
    if len(kinds) > 1:          # One of the two was not meant
        raise UserError(f'{path!r} has rows ({kinds[True]}) and other files ({kinds[False]}); choose one kind with '
                        f'{A_PATTERN}, or read all as text with --text_field=')
    return files

def match(root, pattern):
    """Returns the files that match a pattern, {path below root: file}. Raises UserError and ValueError."""
    if pattern.endswith('**'):          # Before Python 3.13, this would match only folders
        pattern += '/*'
    check_folder(root)
    for above in [*Path(pattern).parents][:-1]:         # all but '.'
        for folder in root.glob(f'{above.as_posix()}/'):
            check_folder(folder)
    found = sorted(root.glob(pattern), key=lambda file: file.parts)         # Windows sorts Paths without case
    names = {file.relative_to(root).as_posix(): file for file in found if not file.is_dir()}
    return {name: file for name, file in names.items() if not SKIPPED.search(name)}

def check_folder(folder):
    """Raises UserError if a folder cannot be read, or belongs to the hub's cache, which has each file twice."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f'{folder} cannot be read; change its permissions, or leave it out with {A_PATTERN}')
    cache = folder.parent if folder.name == 'blobs' else folder
    snapshots = sorted(cache.glob('snapshots/*'))
    if snapshots and (cache / 'blobs').is_dir():
        raise UserError(f'{cache} is a cache of the Hugging Face hub; use --dataset={snapshots[-1]}')

SPLITS = dict(train='train', val='val', valid='val', validation='val', dev='val', test='test')

def split_of(name):
    """Returns the split that the last such word in a path says, else 'train': split_of('my-Test/a.txt') -> 'test'"""
    words = [word for word in re.split(r'[\W\d_]+', name.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else 'train'

def fetch(name, known):
    """
    Returns the path of a file, which is downloaded if it is missing. known: its repo (and repo_type), or its url and
    sha256. Raises UserError.
    """
    path = DOWNLOADS / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if 'repo' in known:
            from huggingface_hub import hf_hub_download
            hf_hub_download(known['repo'], name, repo_type=known.get('repo_type', 'dataset'), local_dir=DOWNLOADS)
        else:
            from torch.hub import download_url_to_file
            download_url_to_file(known['url'], path, known['sha256'])
    except Exception as e:      # Download errors have many types
        raise UserError(f'cannot download a file ({e}); put the file at {path} by hand, or use another')
    return path

# -----------------------------------------------------------------------------
# Documents, as UTF-8 in parts of about BLOCK bytes. A byte 0xff, which UTF-8 never contains, ends each document.

def read_texts(files, separator, label):
    """Yields the documents in files, except blank ones, part by part. Raises UserError."""
    begun = False           # whether a part of the document has been yielded
    size = sum(path.stat().st_size for path in files)           # the text's size, unless it is compressed
    with tqdm(total=size, desc=label, unit='B', unit_scale=True, disable=None, leave=False) as bar:
        for path in files:
            try:
                for part in read_rows(path) if has_rows(path) else cut_text(path, separator):
                    bar.update(len(part))
                    if begun or part.strip() not in (b'', b'\xff'):
                        yield part
                        begun = not part.endswith(b'\xff')
            except ImportError:
                raise
            except UserError as e:
                raise UserError(f'{e}, or leave it out with {A_PATTERN}')
            except Exception as e:      # Every format has its own errors
                raise UserError(f'cannot read {path} ({type(e).__name__}: {e}); restore it, or leave it out')

# Modules that open compressed files
COMPRESSIONS = {'.gz': 'gzip', '.xz': 'lzma', '.bz2': 'bz2',
                '.zst': 'compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd'}

def opened(path):
    """Opens a file, decompressed, after its byte order mark."""
    module = COMPRESSIONS.get(path.suffix.lower(), 'io')
    try:
        file = import_module(module).open(path, 'rb')
    except ImportError:
        raise ModuleNotFoundError(name=module)          # the name to install
    if file.peek(3).startswith(codecs.BOM_UTF8):
        file.read(3)
    return file

def cut_text(path, separator):
    """Yields the parts of a text file, split at its separators. Raises UserError."""
    forms = {separator, separator.replace('\n', '\r\n')} - {''}
    with opened(path) as file:
        for block in read_blocks(file, path, forms):
            yield from re.findall(b'[^\xff]+\xff?|\xff', block)         # each with its end, unless the block ends first
    yield b'\xff'

def suffix_of(path):
    """Returns the suffix of a file without that of a compression: suffix_of(Path('a.JSONL.gz')) -> '.jsonl'"""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix

def has_rows(path):
    return text_field and suffix_of(path) in ROWS

def read_rows(path):
    """Yields the texts in the column text_field of a file; null is an empty text. Raises UserError for other rows."""
    n = 0       # the row's number
    with opened(path) as file:
        try:
            for n, row in enumerate(ROWS[suffix_of(path)](file), 1):
                fields = row if isinstance(row, dict) else {}
                text = fields.get(text_field, row)
                try:
                    yield b'\xff' if text is None else text.encode() + b'\xff'
                except (AttributeError, UnicodeEncodeError) as e:
                    raise UserError(f'row {n} of {path} has no text in {text_field!r}, but {text!r:.60} ({e}; fields: '
                                    f'{[*fields]!s:.200}); use another --text_field, correct the file')
        except (ValueError, csv.Error) as e:
            # the row after the last one that could be read
            raise UserError(f'cannot read row {n + 1} of {path} ({type(e).__name__}: {e}); correct it (as UTF-8)')

def json_rows(file):
    """Reads one object per line, or a list of objects."""
    if file.peek(99).lstrip().startswith(b'['):
        return json.load(file)
    return map(json.loads, filter(bytes.strip, file))

def csv_rows(file, delimiter=','):
    """Reads rows below a header, as in RFC 4180."""
    csv.field_size_limit(1 << 30)       # longest text, in characters (default: 131,072)
    lines = io.TextIOWrapper(file, 'utf-8', newline='')
    for row in csv.DictReader(lines, delimiter=delimiter, strict=True):
        if None in (*row, *row.values()):       # An unquoted text would end at a comma
            raise csv.Error('it does not have as many fields as the header; put texts in quotes')
        if delimiter == '\t' and any('\t' in text and '\n' in text for text in row.values()):
            raise csv.Error('a text has a tab and a line break; double the quote that joins rows, or use CSV')
        yield row

def parquet_rows(file):
    from pyarrow import parquet
    table = parquet.ParquetFile(file)
    columns = [text_field] if text_field in table.schema_arrow.names else None          # None: all
    for batch in table.iter_batches(256, columns=columns):
        yield from batch.to_pylist()

# Functions of an open file that yield rows as dicts, by suffix. Each row is a document. If you add one, raise FORMAT.
ROWS = {'.jsonl': json_rows, '.ndjson': json_rows, '.json': json_rows, '.csv': csv_rows,
        '.tsv': partial(csv_rows, delimiter='\t'), '.parquet': parquet_rows}

# -----------------------------------------------------------------------------
# The validation split, and batches (split, raw) of about BLOCK bytes

def join_parts(parts):
    """Joins (split, part of a text) into batches. A 0xff separates documents; there is none after a split's last."""
    waiting = defaultdict(bytearray)
    for split, part in parts:
        if len(waiting[split]) >= BLOCK:
            yield split, bytes(waiting.pop(split))
        waiting[split] += part
    for split, rest in waiting.items():
        yield split, bytes(rest).removesuffix(b'\xff')

FEW = 200       # With fewer documents, the text is split by position.

def split_texts(files, val_files, separator, val_fraction, label):
    """Yields (split, part of a document), in order. Without val_files, validation gets val_fraction of the text."""
    if val_files:
        for split, paths in ('train', files), ('val', val_files):
            for part in read_texts(paths, separator, label):
                yield split, part
        return
    ends = characters = 0
    for part in read_texts(files, separator, 'counting'):
        ends += part.endswith(b'\xff')
        characters += len(part.decode(errors='ignore'))         # without the 0xff
        if ends == FEW:
            break
    parts = read_texts(files, separator, label)
    if ends == FEW:
        yield from split_by_hash(parts, val_fraction)
    else:
        yield from split_by_position(parts, int(characters * (1 - val_fraction)))

def split_by_hash(parts, val_fraction):
    """Holds out whole documents for validation. A document stays in its split if others are added or removed."""
    for document in whole_documents(parts):
        digest = hashlib.blake2b(document[:-1], digest_size=8).digest()
        number = int.from_bytes(digest, 'big') / 2 ** 64        # in [0, 1), depends only on the text
        yield 'val' if number < val_fraction else 'train', document

def whole_documents(parts):
    """Joins the parts of documents: b'a', b'b\\xff', b'c\\xff' -> b'ab\\xff', b'c\\xff'"""
    document = []
    for part in parts:
        document.append(part)
        if part.endswith(b'\xff'):
            yield b''.join(document)
            document = []

def split_by_position(parts, left):
    """Holds out the end of the text for validation, as nanoGPT does; training gets the first `left` characters."""
    for part in parts:
        text = part.decode(errors='ignore')         # without the 0xff, which goes where the last character went
        cut = len(text[:max(left, 0)].encode()) if left < len(text) else len(part)
        left -= len(text)
        yield 'train', part[:cut]
        yield 'val', part[cut:]

# -----------------------------------------------------------------------------
# Tokens

def make_tokenizer(kind, vocab_size, batches):
    """Returns a tokenizer of this kind, trained on batches if it needs text, or the one in a tokenizer.json."""
    if kind == 'byte':
        return Tokenizer(enumerate(BYTES), [], [END_OF_TEXT])
    if kind == 'gpt2':          # its released file, downloaded once
        kind = fetch('tokenizer.json', dict(repo='openai-community/gpt2', repo_type='model'))
    if kind not in TOKENIZERS:
        tok = load_tokenizer(kind)
        if tok.eot is None:
            raise UserError(f"no token of {kind} is known to end a document; put the model's config.json, with its "
                            f'eos_token_id, next to it')
        return tok

    if kind == 'char':          # char learns from both splits, the others only from train
        texts = (raw.decode(errors='ignore') for _, raw in batches)         # without the 0xff
        return CharTokenizer(sorted({*chain.from_iterable(texts)}))

    train = (raw for split, raw in batches if split == 'train')
    counts = count_words(train, pattern, workers)
    if kind == 'word':
        longer = sorted((-n, word) for word, n in counts.items() if len(word) > 1)       # the most frequent first
        tokens = BYTES + [word for _, word in longer[:vocab_size - 257]]
        return WordTokenizer(enumerate(tokens), [], [END_OF_TEXT], pattern)
    return Tokenizer(*merge_words(counts, vocab_size - 1), [END_OF_TEXT], pattern)

# -----------------------------------------------------------------------------
# The data folder. It is written under another name, and renamed when it is complete and on the disk.

FORMAT = 2      # If you change which tokens a text becomes, raise it, and all folders are made again.

def find_or_prepare(dataset, tokenizer, vocab_size=4096):
    """
    Returns a data set's folder, or dataset itself if it is one. One process makes a missing folder, others wait. The
    other options of this file hold for every data set.
    """
    if is_prepared(dataset):
        return Path(dataset)
    texts = [identify(dataset), identify(val_dataset)]
    check_options(tokenizer, vocab_size)
    settings = dict(format=FORMAT, tokenizer=tokenizer if tokenizer in TOKENIZERS else file_sha256(tokenizer),
                    vocab_size=vocab_size, pattern=pattern, separator=separator_of(dataset), text_field=text_field,
                    val_fraction=val_fraction or DATASETS.get(dataset, {}).get('val_fraction', 0.1),
                    shard_tokens=shard_tokens)
    kind = f'{tokenizer}{vocab_size}' if tokenizer in ('bpe', 'word') else Path(tokenizer).stem
    folder = Path(f'data/{data_name(dataset)}-{kind}-{short_hash(json.dumps([settings, texts]))}')
    if not folder.exists():
        with lock(folder.with_name(f'.{folder.name}.lock')):
            if not folder.exists():         # Another process may have made it meanwhile
                make_folder(folder, dataset, tokenizer, settings)
    return folder

def is_prepared(dataset):
    return os.path.exists(f'{dataset}/train_000.bin') or os.path.exists(f'{dataset}/train.bin')

def separator_of(dataset):
    r"""Returns the text between documents. \n and \t are escapes, because line breaks are hard to type."""
    typed = separator
    if separator == END_OF_TEXT:        # the default
        typed = DATASETS.get(dataset, {}).get('separator', separator)
    return typed.replace('\\n', '\n').replace('\\t', '\t')

def data_name(dataset):
    """Returns the name of a data set, or that of a file or folder without suffixes: 'texts/books.txt.xz' -> 'books'"""
    name = Path(os.path.abspath(WILDCARDS.sub('', dataset))).name.lstrip('.')
    stem = re.sub(r'([.][A-Za-z]\w*)+$', '', name)         # A suffix begins with a letter, a date or version does not
    return re.sub(r'[^\w-]', '_', stem)

def identify(dataset):
    """Returns what identifies a text: its entry in DATASETS, or the split, path, size and time of each file."""
    if not dataset or is_prepared(dataset):
        return dataset
    if dataset in DATASETS:
        return DATASETS[dataset]
    return [[split, os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns]
            for split, files in find_splits(dataset).items() for file in files]

def short_hash(text):
    """Returns eight hex digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]

def without(files, others):
    """Returns the files that are not among others, also not by another name (a link)."""
    same = {os.stat(file)[1:3] for file in others}           # st_ino and st_dev
    return [file for file in files if os.stat(file)[1:3] not in same]

def make_folder(folder, dataset, tokenizer, settings):
    """Makes a data folder and prints what is in it. Raises UserError."""
    files = find_splits(dataset)
    val = [*find_files(val_dataset).values()] if val_dataset else files['val']
    if val and val_fraction:
        raise UserError(f'val_fraction = {val_fraction}, but the files for validation are given (first '
                        f'{val[0]}); leave it out, or rename these files')
    train = without(files['train'], val + files['test'])
    left_out = without(sum(files.values(), []), train + val)
    print(f'preparing {visible(dataset)} -> {folder}')
    for what, paths in {'training': train, 'validation': val, 'left out, for validation or testing': left_out}.items():
        if paths:
            size = sum(path.stat().st_size for path in paths)
            print(f'{what}: {count(len(paths), "file")}, {size:,} bytes, first {visible(paths[0])}')
    read = partial(split_texts, train, val, settings['separator'], settings['val_fraction'])
    tok = make_tokenizer(tokenizer, settings['vocab_size'], join_parts(read('learning tokens')))
    meta = dict(settings, dataset=dataset, source=DATASETS.get(dataset, {}).get('source', dataset),
                val_dataset=val_dataset, tokenizer=tokenizer, vocab_size=tok.vocab_size, dtype=np.dtype(tok.dtype).str)
    with new_folder(folder) as new:
        meta.update(write_shards(new, tok, join_parts(read('encoding'))))
        meta['eot'] = tok.eot if meta['train']['documents'] > 1 else None       # None: the model never sees an end
        tok.save(new / 'tokenizer.json')
        write_json(new / 'meta.json', meta)

def write_shards(folder, tok, batches):
    """Encodes batches into shards, and prints statistics. Returns {split: its entry in meta.json}."""
    meta = dict(train=Counter(documents=1), val=Counter(documents=1))           # the last document has no end
    sizes = Counter()           # tokens by shard
    for split, ids, counts in parallel_map(partial(encode_batch, tok), batches, workers):
        start = meta[split]['tokens']
        if start == 0:
            ids = np.insert(ids, 0, tok.opening)
        cuts = range(shard_tokens - start % shard_tokens, len(ids), shard_tokens)
        for i, part in enumerate(np.split(ids, cuts), start // shard_tokens):
            name = f'{split}_{i:03d}.bin'
            with open(folder / name, 'ab') as file:
                file.write(part)
            sizes[name] += len(part)
        meta[split].update(counts, tokens=len(ids))         # Counter.update adds

    for split, m in meta.items():
        if not m['tokens']:
            raise UserError(f'the {split} split is empty (a file in both is only for validation); use more text, '
                            f'another --val_dataset or --val_fraction, or rename files (see --help)')
        m['shards'] = [dict(name=name, tokens=n, sha256=file_sha256(folder / name))
                       for name, n in sizes.items() if name.startswith(split)]
        print(f'{split:5} | {count(m["documents"], "document")} | {m["bytes"]:,} bytes | {m["tokens"]:,} '
              f'tokens | {m["bytes"] / m["tokens"]:.2f} bytes per token')
    return meta

def read_meta(folder):
    """Returns a data folder's meta.json, or one made for nanoGPT's. Raises UserError if a shard has another size."""
    try:
        meta = read_nanogpt(folder) if (folder / 'train.bin').exists() else read_json(folder / 'meta.json')
        if (type(meta['source']), type(meta['vocab_size'])) != (str, int):
            raise TypeError('its source or vocab_size has another type')
        for shard in meta['train']['shards'] + meta['val']['shards']:
            size = (folder / shard['name']).stat().st_size
            if size != shard['tokens'] * np.dtype(meta['dtype']).itemsize:
                raise ValueError(f'{shard["name"]} has {size:,} bytes, but {shard["tokens"]:,} tokens')
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise UserError(f'cannot train on {folder} ({e}); copy it again, or if prepare.py made it, remove it')
    return meta

def read_nanogpt(folder):
    """
    Returns a meta.json for nanoGPT's train.bin and val.bin. Their vocabulary is that of a tokenizer.json next to them.
    Without one, it ends at the largest id among the first 16,777,216 of each file, because a file may be large.
    """
    meta = dict(source=f'{folder} (by nanoGPT)', dtype='<u2', vocab_size=0)
    for split in 'train', 'val':
        path = folder / f'{split}.bin'
        first, size = np.fromfile(path, '<u2', 1 << 24), path.stat().st_size
        mark = f'{hashlib.sha256(first).hexdigest()} {size}'
        meta[split] = dict(shards=[dict(name=path.name, tokens=size // 2, sha256=mark)])
        meta['vocab_size'] = max(meta['vocab_size'], int(first.max()) + 1)
    meta['eot'] = 50256 if meta['vocab_size'] == 50257 else None           # GPT-2's
    if (folder / 'tokenizer.json').exists():
        tok = load_tokenizer(folder)
        meta.update(vocab_size=tok.vocab_size, eot=tok.eot if tok.eot in range(meta['vocab_size']) else None)
    return meta

def data_hash(meta):
    """Returns eight hex digits that identify the tokens of both splits."""
    return short_hash(''.join(shard['sha256'] for shard in meta['train']['shards'] + meta['val']['shards']))

# -----------------------------------------------------------------------------
# Reading shards. A split's tokens are in several .bin files, which meta.json lists.

class Shards:
    """
    Reads the shards of a split as one long array of tokens. tok: their tokenizer, if it is known. train.py uses len(),
    starts(), batch() and tok, and for validation text_bytes().
    """
    def __init__(self, folder, split, meta, tok=None):
        self.tok = tok
        shards = meta[split]['shards']
        self.paths = [folder / shard['name'] for shard in shards]
        self.open = lru_cache(maxsize=16)(partial(open, mode='rb', buffering=0))            # few may be open at once
        self.shard_starts = [0, *accumulate(shard['tokens'] for shard in shards)]
        self.dtype = np.dtype(meta['dtype'])
        self.vocab_size = meta['vocab_size']

    def __len__(self):
        return self.shard_starts[-1]

    def text_bytes(self, ids):
        """
        Returns how many bytes of text an array of ids has, for bits per byte: 0 if there is no tokenizer. Ids that
        begin or end a document, and targets of -100, have none.
        """
        if not self.tok:
            return 0
        return len(self.tok.decode_bytes(ids[~np.isin(ids, [self.tok.eot, *self.tok.opening, -100])]))

    def read(self, start, length):
        """Returns tokens[start : start + length], across shards."""
        i = bisect_right(self.shard_starts, start) - 1
        file, width = self.open(self.paths[i]), self.dtype.itemsize
        here = min(length, self.shard_starts[i + 1] - start)            # The rest is in the next shard
        file.seek((start - self.shard_starts[i]) * width)
        tokens = np.frombuffer(file.read(here * width), self.dtype)
        if len(tokens) < here:          # A memmap would kill the process
            raise UserError(f'{file.name} has become shorter; copy or prepare the folder again')
        return np.append(tokens, self.read(start + here, length - here)) if here < length else tokens

    def starts(self, first, count, T, seed):
        """
        Returns where `count` sequences of T tokens start, from the run's sequence number `first` on. Epochs follow each
        other without end. Nothing else is random, so there is no state to save. For another T, the order is another.
        """
        n = (len(self) - T) // T        # sequences per epoch; T tokens are left over for an offset and the last target
        return [epoch_order(seed, i // n, n, T)[i % n] for i in range(first, first + count)]

    def batch(self, starts, T, device='cpu'):
        """Returns the sequences at these starts as idx and targets, (2, B, T) int64 on a device. Raises UserError."""
        import torch        # not needed to prepare data
        ids = np.array([self.read(start, T + 1) for start in starts], np.int64)
        if ids.max() >= self.vocab_size:
            raise UserError(f'{self.paths[0]} or a later shard has the id {ids.max()}, but all ids should be '
                            f'below {self.vocab_size:,}; copy or prepare the folder again')
        batch = torch.from_numpy(np.stack([ids[:, :-1], ids[:, 1:]]))
        if 'cuda' in device:
            batch = batch.pin_memory()
        return batch.to(device, non_blocking='cuda' in device)

@lru_cache(maxsize=8)       # two epochs of a few data sets
def epoch_order(seed, epoch, n, T):
    """
    Returns where the n sequences of an epoch start, in random order. They follow each other from a random offset below
    T, and leave out fewer than 2 T tokens of the text. Order and offset depend on seed and epoch alone.
    """
    # Philox's raw words are the same in every version of numpy.
    words = np.random.Philox(key=[seed, epoch]).random_raw(n + 1)
    return np.argsort(words[1:], kind='stable') * T + int(words[0]) % T         # int64 + uint64 would be float64

# -----------------------------------------------------------------------------

def main():
    check_prepared(config)
    folder = find_or_prepare(dataset, tokenizer, vocab_size)
    read_meta(folder)
    print(f'ready: {folder}')
    return folder

if __name__ == '__main__':
    launch(main)
