"""
Turns raw text into token shards that train.py reads.

    python prepare.py                                            # the Python standard library, BPE of 4,096
    python prepare.py --dataset=names --tokenizer=char
    python prepare.py --dataset=tinystories --vocab_size=10000
    python prepare.py --dataset=path/to/my_text.txt              # a file (.txt, .jsonl, .csv, ...) or a folder of them
    python prepare.py --tokenizer=data/names-bpe4096/tokenizer.json    # evaluate the tokenizer of another text

It writes data/<name>-<tokenizer><vocab_size>/ with train_000.bin, ..., val_000.bin (headerless uint16; uint32 if the
vocabulary is above 65,536), meta.json and tokenizer.json, and prints a summary. train.py prepares missing data by
itself.
"""
import codecs
import csv
import hashlib
import io
import json
import math
import os
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path

import fsspec
import numpy as np
from tqdm import tqdm

from configurator import UserError, check_range, configure, count, file_sha256, launch, lock, new_folder, read_json
from tokenizer import (BLOCK, END_OF_TEXT, PATTERNS, CharTokenizer, NotUTF8, Tokenizer, WordCounter, WordTokenizer,
                       add_counts, byte_tokenizer, check_vocab_size, default_workers, load_tokenizer, merge_words,
                       parallel_map, read_blocks, special_pattern)

# -----------------------------------------------------------------------------
dataset = 'python'          # python, tinystories, openwebtext, fineweb_edu, shakespeare, names, or any path
val_dataset = ''            # path of the validation text ('': part of dataset)
tokenizer = 'bpe'           # bpe, char, byte, word, gpt2, or the path of a tokenizer.json. Special tokens are
                            # ordinary text in documents, but single ids in the prompt of sample.py
vocab_size = 4096           # vocabulary size for bpe and word, including bytes and special tokens, 257 or more
pattern = 'gpt2'            # how bpe and word split text into words: gpt2 or gpt4
val_fraction = 0.0          # share of the text held out for validation, below 1 (0: the data set's own, or 0.1)
separator = END_OF_TEXT     # text between documents: <|endoftext|> or any (\n: one per line; '': one per file)
text_field = 'text'         # field or column with the text in .jsonl, .json, .csv, .parquet and .arrow files
shard_tokens = 100_000_000  # tokens per .bin file, 1 or more
workers = 0                 # number of processes (0: one per core)
# -----------------------------------------------------------------------------
config = configure(globals())

# A function takes an option as a parameter if train.py or DATASETS may set another value, or if it runs in worker
# processes (see parallel_map): on macOS and Windows these import this file anew, so that every option has its default
# there. Functions read other options directly.
TOKENIZERS = ('bpe', 'char', 'byte', 'word', 'gpt2')

def refuse_unused(used):
    """Raises UserError if an option was typed but is not used."""
    for name, is_used in used.items():
        typed = config.source.get(name, '')
        if typed.startswith('--') and config[name] != config.defaults[name] and not is_used:
            raise UserError(f'{typed} has no effect here; leave it out')

def check_options(tokenizer, vocab_size):
    """Raises UserError if an option's value is not valid, or not used."""
    if tokenizer not in TOKENIZERS and not os.path.isfile(tokenizer):
        if tokenizer.endswith('tokenizer.json'):        # its error names what the folder has
            load_tokenizer(tokenizer)
        raise UserError(f'tokenizer = {tokenizer!r} is unknown; use {", ".join(TOKENIZERS)}, or the path of a '
                        f'tokenizer.json')
    if pattern not in PATTERNS:
        raise UserError(f'pattern = {pattern!r} is unknown; use {" or ".join(PATTERNS)}')
    has_words = tokenizer in ('bpe', 'word')
    if has_words:
        check_vocab_size(vocab_size, [END_OF_TEXT])
    refuse_unused(dict(pattern=has_words, vocab_size=has_words))
    if separator in ('n', 'nn', 'rn', 't'):         # A shell removes an unquoted backslash
        raise UserError(f"separator = {separator!r} may have lost a \\ in the shell; quote it, as in --separator='\\n'")
    check_range(config, 0, 1, 'val_fraction')
    check_range(config, 0, math.inf, 'workers')
    check_range(config, 1, math.inf, 'shard_tokens')

# -----------------------------------------------------------------------------
# Sources of text

DATASETS = {    # files in a repo on the Hugging Face hub or at a url; start: the first words of train.py's samples
    'python': dict(separator='', start='def'),
    'tinystories': dict(repo='roneneldan/TinyStories', val_fraction=0.0,
                        files=['TinyStoriesV2-GPT4-train.txt', 'TinyStoriesV2-GPT4-valid.txt']),
    'openwebtext': dict(repo='stanford-cs336/owt-sample', val_fraction=0.0,
                        files=['owt_train.txt.gz', 'owt_valid.txt.gz']),
    'fineweb_edu': dict(repo='HuggingFaceFW/fineweb-edu', val_fraction=0.001,
                        files=[f'sample/10BT/{i:03d}_00000.parquet' for i in range(14)]),
    'shakespeare': dict(url='https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
                        files=['tinyshakespeare.txt'],
                        sha256='86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'),
    'names': dict(url='https://raw.githubusercontent.com/karpathy/makemore/master/names.txt', files=['names.txt'],
                  separator='\n', sha256='0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d'),
}
DOWNLOADS = Path('data/downloads')

def find_source(dataset):
    """
    Returns the settings for meta.json, and the files of a data set and of val_dataset as {path: name in the data set},
    which are empty if there is no such path.
    """
    known = DATASETS.get(dataset, {})
    val_files = find_files(val_dataset)
    files = {DOWNLOADS / name: name for name in known.get('files', [])} or find_files(dataset)
    files = {path: name for path, name in files.items() if path not in val_files}
    source = portable(dataset)
    if dataset == 'python':
        files = standard_library()
        source = f'Python {sys.version.split()[0]}'
    cut_at = known.get('separator', separator) if separator == END_OF_TEXT else separator
    # Line breaks are hard to type in a command, so \n, \r and \t are escapes. For \n, cut_text also finds \r\n.
    cut_at = cut_at.replace('\\n', '\n').replace('\\r', '\r').replace('\\t', '\t').replace('\r\n', '\n')
    # These options change the tokens, so a folder that was made with other values is refused.
    held_out = 0.0 if val_dataset else val_fraction or known.get('val_fraction', 0.1)
    settings = dict(dataset=data_name(dataset), source=source, val_dataset=val_dataset and portable(val_dataset),
                    val_fraction=held_out, separator=cut_at, text_field=text_field, pattern=pattern)
    return settings, files, val_files

def portable(path):
    """Returns a real path, relative to the current folder if it is inside, so that a project can be moved."""
    real = os.path.realpath(path)
    return Path(os.path.relpath(real) if Path(real).is_relative_to(Path.cwd()) else real).as_posix()

def standard_library():
    """Returns {path: ''} of the running interpreter's .py files, without tests, packages, tables and prose."""
    root = Path(os.__file__).parent
    skip = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'encodings', 'pydoc_data'}
    files = [path for path in root.rglob('*.py') if skip.isdisjoint(path.relative_to(root).parts)]
    return dict.fromkeys(sorted(files, key=Path.as_posix), '')

def find_files(root):
    """Returns the files at a path (none for '') as {path: name below root}, sorted."""
    paths = all_files(Path(root), () if Path(root) == DOWNLOADS else (DOWNLOADS.resolve(),)) if root else []
    names = {path: path.relative_to(root).as_posix() for path in sorted(paths)}
    return {path: name for path, name in names.items() if not ABOUT.fullmatch(name)}

# Hidden files, backups, incomplete downloads, packages, and what caches of Hugging Face hold a second time
NO_DATA = re.compile('[.].*|~[$].*|#.*#|.*(~|[.](bak|orig|swp|tmp|part|download|crdownload|aria2)|:Zone[.]Identifier)'
                     '|desktop[.]ini|thumbs[.]db|node_modules|site-packages|__pycache__|blobs|cache-.*[.]arrow', re.I)
ABOUT = re.compile('(readme|licen[cs]e)([.](md|txt))?', re.I)         # files about the data, next to them

def all_files(path, above):
    """Yields the files at a path, except those that are not data, and those in the folders `above`."""
    if path.is_file():
        yield path
    elif path.is_dir():
        real = path.resolve()
        for inside in path.iterdir() if real not in above else []:         # A link to a folder above it is a loop
            if not NO_DATA.fullmatch(inside.name) and not is_ours(inside):
                yield from all_files(inside, (*above, real))
    elif path.is_symlink():
        raise UserError(f'{path} is a link to {os.path.realpath(path)}, which does not exist; restore that, or remove '
                        f'the link')

def is_ours(folder):
    """Returns whether a folder is a run or has tokens that were prepared here."""
    signs = ('log.jsonl', 'config.py'), ('train_000.bin', 'meta.json')
    return any(all((folder / name).exists() for name in names) for names in signs)

SPLITS = dict.fromkeys(['train', 'training'], 'train')
SPLITS |= dict.fromkeys('val valid validation validate dev development eval evaluation holdout testa'.split(), 'val')
SPLITS |= dict.fromkeys('test testing testb devtest tst'.split(), 'test')

def split_of(name):
    """Returns the last split in a path, or '': split_of('my_test/a.txt') -> 'test', split_of('valData.tsv') -> 'val'"""
    name = re.sub('(held|hold)[-_ ]?out', 'holdout', name, flags=re.I)
    words = re.split(r'[\W\d_]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', name)         # QATest1 is QA and Test
    words += name.split('/')[:-1]           # exact folder names win
    words = [re.sub('^news(discuss)?|(set|data|file|s)$', '', word.lower()) for word in words]
    return ['', *[SPLITS[word] for word in words if word in SPLITS]][-1]

def sort_files(files):
    """
    Sorts files by words in their names. Returns {'train', 'val', 'test', 'other': paths}. Others have another format.
    If half of the files or more name a split, training and another one among them, the rest are others, too.
    """
    formats = {path: reader_of(path) or kind_of_text(path) for path in shown(files, 'looking at files')}
    sizes = Counter()
    for path, kind in formats.items():
        sizes[kind] += path.stat().st_size
    del sizes['binary']         # Archives and pictures are never read
    largest = max(sizes, key=lambda kind: (kind != 'markup', sizes[kind]), default='')
    parts = dict(train=[], val=[], test=[], other=[])
    splits = Counter(split_of(files[path]) for path, kind in formats.items() if kind == largest)
    unnamed = splits.pop('', 0)
    rest = 'other' if splits['train'] and len(splits) > 1 and unnamed <= splits.total() else 'train'
    for path, kind in formats.items():
        part = split_of(files[path]) or rest
        parts[part if kind == largest else 'other'].append(path)
    return parts

def leave_out_copies(parts, hashes):
    """Moves copies of files, also compressed ones, to 'other', because validation text must not be trained on."""
    contents = set()
    for split in 'val', 'test', 'train':
        paths, parts[split] = parts[split], []
        for path in paths:
            content = hashes.get(path, path)        # Files of known data sets have no hash and no copies
            is_packed = re.search(PACKED, path.name.lower()) and path.with_suffix('') in hashes
            parts['other' if is_packed or content in contents else split].append(path)
            contents.add(content)

PACKED = '[.](gz|xz|zst|bz2|lzma)$'

def reader_of(path):
    """Returns the function that reads rows of a format, None for text: reader_of(Path('a.csv.1.gz')) -> csv_rows"""
    name = re.sub(rf'(-\d+-of-\d+)?({PACKED})?$', '', path.name.lower())
    if '.' not in name:
        with opened(path) as file:
            return json_rows if re.match(rb'\s*(\[\s*)?{\s*"', file.read(100)) else None
    suffixes = [suffix for suffix in Path(name).suffixes if not suffix[1:].isdigit()]
    if suffixes[-1:] == ['.txt']:           # Browsers append it
        suffixes.pop()
    return READERS.get(''.join(suffixes[-1:]))

def kind_of_text(path):
    with opened(path) as file:
        if b'\0' in file.read(8000):
            return 'binary'
    return 'markup' if path.suffix.lower() in MARKUP else 'text'

def shown(files, label):
    """Returns the files, with a progress bar if reading takes long."""
    return tqdm(files, label, disable=None, leave=False, delay=2)

def some_names(files):
    """
    Returns the number, the first three names, and the suffixes if there are several: some_names([Path('w/x/a.txt')]) ->
    '1 file (x/a.txt)'
    """
    names = ', '.join('/'.join(path.parts[-2:]) for path in files[:3])
    suffixes = Counter(path.suffix or path.name for path in files).most_common(4)
    if len(suffixes) > 1:
        names = ', '.join(f'{n} {suffix}' for suffix, n in suffixes) + f': {names}'
    return f'{count(len(files), "file")} ({names})'

def joint_sha256(strings):
    """Returns one sha256 for several strings, in order."""
    return hashlib.sha256(os.fsencode(''.join(strings))).hexdigest()

def fetch(files, known):
    """Downloads missing files. known: their repo (and repo_type), or one file's url and sha256. Raises UserError."""
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
        except Exception as e:      # Download errors have many types
            raise UserError(f'cannot download a file ({e}); put the file at {path} by hand, or use --dataset=python')

def data_name(dataset):
    """Returns the name of a data set, or the stem of a path: data_name('texts/books.txt.xz') -> 'books'"""
    name = Path(os.path.abspath(dataset)).name.lstrip('.')
    stem = re.sub(r'([.][A-Za-z]\w*)+$', '', name)         # A suffix begins with a letter, a date or version does not
    return re.sub(r'[^\w-]', '_', stem)

def data_folder(dataset, tokenizer, vocab_size):
    """Returns the folder of a data set's shards: data_folder('names', 'char', 0) -> Path('data/names-char')"""
    kind = tokenizer
    if tokenizer in ('bpe', 'word'):
        kind = f'{tokenizer}{vocab_size}'
    elif tokenizer not in TOKENIZERS:
        kind = f'tok{file_sha256(tokenizer)[:8]}'
    return Path(f'data/{data_name(dataset)}-{kind}')

# -----------------------------------------------------------------------------
# Documents, as UTF-8 in parts of about BLOCK bytes. A byte 0xff, which UTF-8 never contains, ends each document.

def read_texts(files, separator, label):
    """Yields the documents in files, except blank ones, part by part. Raises UserError."""
    bad = {}
    begun = False           # whether a part of the document has been yielded
    size = sum(path.stat().st_size for path in files)           # the text's size, unless it is compressed
    with tqdm(total=size, desc=label, unit='B', unit_scale=True, disable=None, leave=False) as bar:
        for path in files:
            reader = reader_of(path)
            try:
                with opened(path) as file:
                    for part in texts_of(reader(file), path) if reader else cut_text(file, path, separator):
                        bar.update(len(part))
                        if begun or part.strip() not in (b'', b'\xff'):
                            yield part
                            begun = not part.endswith(b'\xff')
            except NotUTF8 as e:        # Keep reading, to name all such files at once
                bad[path] = e
    if bad:
        first, *others = bad
        more = f', and do the same for {some_names(others)}' if others else ''
        raise UserError(f'{bad[first]}{more}')

@contextmanager
def opened(path):
    """Opens a file, decompressed, without its byte order mark; UTF-16 with one becomes UTF-8. Raises UserError."""
    with open(path, 'rb') as file:
        if file.read(40).startswith(b'version https://git-lfs'):
            raise UserError(f'{path} is only a Git LFS pointer; run git lfs pull')
    try:
        # By default, fsspec would open the first file of a .zip, and not name the package that a .zst needs.
        compression = {'.zip': None, '.zst': 'zstd'}.get(path.suffix.lower(), 'infer')
        with fsspec.filesystem('file').open(path, compression=compression) as file:
            mark = file.read(3)
            file.seek(3 if mark == codecs.BOM_UTF8 else 0)
            if mark[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                file = io.BytesIO(file.read().decode('utf-16').encode())
            yield file
    except (UserError, ImportError):
        raise
    except UnicodeDecodeError as e:
        raise NotUTF8(path, e, None)
    except Exception as e:      # Every format has its own errors
        raise UserError(f'cannot read {path} ({type(e).__name__}: {e}); check the file (.zst needs `pip install '
                        f'backports.zstd`)')

def cut_text(file, path, separator):
    """Yields the parts of a text, split at its separators."""
    forms = {separator, separator.replace('\n', '\r\n')} - {''}
    pattern = special_pattern(forms, bytes)
    for block in read_blocks(file, path, forms):
        *documents, rest = pattern.split(block)[::2] if pattern else [block]
        for text in documents:
            yield text + b'\xff'
        yield rest
    yield b'\xff'

def texts_of(rows, path):
    """Yields the texts in rows, which must be objects with a field text_field. Raises UserError."""
    i, row = 1, None
    try:
        for row in rows:
            yield ('' if row[text_field] is None else row[text_field]).encode() + b'\xff'
            i, row = i + 1, None
    except (LookupError, TypeError, AttributeError, UnicodeEncodeError, json.JSONDecodeError, csv.Error) as e:
        fields = f'; fields: {", ".join(map(repr, row))}' if isinstance(row, dict) else ''
        raise UserError(f'{path}, record {i}, is not an object with a text in {text_field!r} ({type(e).__name__}: '
                        f'{getattr(e, "msg", e)}{fields}); use another --text_field, correct the record, or move the '
                        f'file away')

def parquet_rows(file):
    from pyarrow.parquet import ParquetFile
    table = ParquetFile(file)
    columns = [text_field] if text_field in table.schema_arrow.names else None
    return (row for batch in table.iter_batches(256, columns=columns) for row in batch.to_pylist())

def arrow_rows(file):       # the format of Hugging Face's `datasets`
    from pyarrow.ipc import open_stream
    return (row for batch in open_stream(file) for row in batch.to_pylist())

def jsonl_rows(file):
    return map(json.loads, filter(bytes.strip, file))

def json_rows(file):
    """Reads one object per line, a list of objects, or one object."""
    first = next(filter(bytes.strip, file), b'[]').strip()
    if first.startswith(b'{') and first.endswith(b'}'):
        return jsonl_rows(chain([first], file))
    rows = json.loads(first + file.read())
    return [rows] if isinstance(rows, dict) else rows

def csv_rows(file):
    csv.field_size_limit(1 << 30)       # longest text, in characters (default: 131,072)
    lines = io.TextIOWrapper(file, 'utf-8', newline='')
    head = next(filter(str.strip, lines), '')
    delimiter = max(',;\t', key=head.count)         # a tab in .tsv, a semicolon where the comma is decimal
    for row in csv.DictReader(chain([head], lines), delimiter=delimiter, strict=True):
        if None in (*row, *row.values()):       # An unquoted text would end at a comma or line break
            raise csv.Error(f'not as many {delimiter!r}-separated fields as the header; put texts in quotes')
        if delimiter == '\t' and any('\t' in value and '\n' in value for value in row.values()):
            raise csv.Error('a stray quote joins rows; double it, and quote the text')
        yield row

# Formats with a document in each row
READERS = {'.parquet': parquet_rows, '.arrow': arrow_rows, '.csv': csv_rows, '.tsv': csv_rows, '.json': json_rows,
           **dict.fromkeys(['.jsonl', '.ndjson', '.jsonlines', '.jl'], jsonl_rows)}
# Formats that are read as text only if there is nothing else
MARKUP = '.ipynb .canvas .rtf .pdf .eml .htm .html .xml .svg'.split()

# -----------------------------------------------------------------------------
# The validation split, and batches (split, raw) of about BLOCK bytes

def join_parts(parts):
    """Joins (split, part of a text) into batches."""
    waiting = defaultdict(bytearray)
    for split, part in parts:
        waiting[split] += part
        if len(waiting[split]) >= BLOCK:
            yield split, bytes(waiting.pop(split))
    for split, rest in waiting.items():
        yield split, bytes(rest)

FEW = 200       # With fewer documents, the text is split by position

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
        return byte_tokenizer()
    if kind == 'gpt2':          # its released file, downloaded once
        kind = DOWNLOADS / 'tokenizer.json'
        fetch([kind], dict(repo='openai-community/gpt2', repo_type='model'))
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
    counts = add_counts(parallel_map(WordCounter(pattern), train, workers or default_workers()), pattern)
    if kind == 'word':
        longer = sorted((-n, word) for word, n in counts.items() if len(word) > 1)       # the most frequent first
        tokens = [bytes([b]) for b in range(256)] + [word for _, word in longer[:vocab_size - 257]]
        return WordTokenizer(dict(enumerate(tokens)), [], [END_OF_TEXT], pattern)
    return Tokenizer(*merge_words(counts, vocab_size, [END_OF_TEXT]), [END_OF_TEXT], pattern)

def encode_batch(tok, batch):
    """
    Returns the split of a batch, its ids and counts for meta.json. It runs in worker processes and reads no option, so
    pass those that it needs as parameters.
    """
    split, raw = batch
    ends = raw.count(b'\xff')
    between = [tok.eot, *tok.opening]       # write_shards adds the first document's opening
    ids = tok.encode_bytes(raw.replace(b'\xff', b'\xff' * len(between)), between * ends)
    return split, ids, dict(documents=ends, bytes=len(raw) - ends)

# -----------------------------------------------------------------------------
# The data folder. It is written under another name, and renamed when it is complete and on the disk.

def find_or_prepare(dataset, tokenizer, vocab_size=4096):
    """
    Returns the data folder of a data set, or dataset itself if it is one. One process prepares a missing folder while
    others wait. The text is not needed afterwards. Raises UserError if a folder was made from other text or settings.
    """
    folder = Path(dataset)
    if (folder / 'train_000.bin').exists() or (folder / 'train.bin').exists():
        made_with = config.defaults | read_meta(folder)
        refuse_unused({name: config[name] == made_with[name] for name in config if name not in ('dataset', 'workers')})
        return folder
    check_options(tokenizer, vocab_size)
    folder = data_folder(dataset, tokenizer, vocab_size)
    settings, files, val_files = find_source(dataset)
    made_with = read_meta(folder) if folder.exists() else {}
    gone = not files or val_dataset and not val_files
    if gone and made_with.get('source') != settings['source']:
        besides = f' besides {val_dataset}' if val_files else ''
        names = '' if files else f', or {", ".join(DATASETS)}'
        raise UserError(f'no text at {(val_dataset if files else dataset)!r}{besides}; use another path{names}')
    own = val_files if dataset in DATASETS else val_files | files       # the user's files, which may change
    stamp = joint_sha256(f'{name} {stamp_of(path)}' for path, name in own.items())
    if not gone and made_with.get('source_stamp') != stamp:         # Otherwise the text is not read again
        hashes = {path: file_sha256(path) for path in shown(own, 'hashing')}
        settings['source_hash'] = joint_sha256(f'{own[path]} {sha256}' for path, sha256 in hashes.items())
    if not folder.exists():
        os.makedirs(DOWNLOADS, exist_ok=True)
        with lock(folder.with_name(f'.{folder.name}.lock')):
            if not folder.exists():         # Another process may have made it meanwhile
                fetch(files, DATASETS.get(dataset))
                parts = sort_files(files)
                if val_files:
                    found = sort_files(val_files)
                    val = found['val'] or found['test'] or found['train']
                    parts['other'] += parts['val'] + sorted(val_files.keys() - val)
                    parts['val'] = val
                leave_out_copies(parts, hashes)
                make_folder(folder, dict(settings, source_stamp=stamp), parts, tokenizer, vocab_size)

    made_with = config.defaults | read_meta(folder)         # A folder may be older than an option
    refuse_unused({name: made_with.get(name) is not None for name in settings})         # None: not used by these texts
    for key, value in settings.items():
        if made_with.get(key, value) not in (value, None):
            other = 'other texts or paths' if key == 'source_hash' else f'{key} = {made_with[key]!r}, not {value!r}'
            raise UserError(f'{folder} was made with {other}; remove it to make it again, rename the text, or train on '
                            f'it as it is with --dataset={folder}')
    return folder

def make_folder(folder, settings, parts, tokenizer, vocab_size):
    """Makes a data folder and prints a summary."""
    found = '; '.join(f'{part}: {some_names(paths)}' for part, paths in parts.items() if paths)
    if not parts['train'] or (val_dataset and not parts['val']):
        raise UserError(f'no text for training, or for validation with --val_dataset ({found}); unpack archives, '
                        f'convert files to UTF-8, leave out copies, and rename training files called val or test')
    texts = parts['train'] + parts['val']
    tables = [path for path in texts if reader_of(path)]
    used = dict(text_field=tables, separator=len(tables) < len(texts), val_fraction=not parts['val'])
    refuse_unused(used)
    print(f'preparing {settings["source"]} -> {folder} ({found})')
    read = partial(split_texts, parts['train'], parts['val'], settings['separator'], settings['val_fraction'])
    tok = make_tokenizer(tokenizer, vocab_size, join_parts(read('learning tokens')))
    settings.update((name, None) for name in used if not used[name])
    meta = dict(settings, tokenizer=tokenizer, vocab_size=tok.vocab_size, dtype=np.dtype(tok.dtype).str, eot=tok.eot)

    with new_folder(folder) as new:
        meta.update(write_shards(new, tok, join_parts(read('encoding'))))
        tok.save(new / 'tokenizer.json')
        meta['tokenizer_sha256'] = file_sha256(new / 'tokenizer.json')
        (new / 'meta.json').write_text(json.dumps(check_data(new, meta), indent=1))
    print_summary(meta, tok)
    documents = meta['train']['documents'] + meta['val']['documents']
    filled = sum(path.stat().st_size > 0 for path in texts)
    if 'separator' in config.source and settings['separator'] and documents <= filled:
        print(f'the separator {settings["separator"]!r} separates nothing: each file is one document')

def write_shards(folder, tok, batches):
    """Encodes batches into shards. Returns {split: its entry in meta.json}."""
    meta = dict(train=Counter(), val=Counter())
    for split, ids, counts in parallel_map(partial(encode_batch, tok), batches, workers or default_workers()):
        start = meta[split]['tokens']
        if start == 0:
            ids = np.insert(ids, 0, tok.opening)
        counts['tokens'] = len(ids)
        cuts = range(shard_tokens - start % shard_tokens, len(ids), shard_tokens)
        for i, part in enumerate(np.split(ids, cuts), start // shard_tokens):
            with open(folder / f'{split}_{i:03d}.bin', 'ab') as file:
                file.write(part)
        meta[split].update(counts)          # Counter.update adds

    for split, counts in meta.items():
        if not counts['tokens']:
            raise UserError(f'the {split} split is empty; use more text, or without validation files another '
                            f'--val_fraction')
        n = math.ceil(counts['tokens'] / shard_tokens)
        counts['shards'] = [dict(name=f'{split}_{i:03d}.bin') for i in range(n)]        # check_data adds the rest
    return meta

def print_summary(meta, tok):
    """Prints statistics of each split and of the vocabulary."""
    for split in ('train', 'val'):
        m = meta[split]
        documents = max(m['documents'], 1)          # A document counts where it ends
        print(f'{split:14} | {count(documents, "document")} | {m["bytes"]:,} bytes | {m["tokens"]:,} tokens | '
              f'{m["bytes"] / m["tokens"]:.2f} bytes per token')
    longest = sorted(tok.vocab.values(), key=lambda token: len(token.strip()))[-5:]
    longest = [token[:40].decode(errors='replace') for token in longest]
    print(f'vocabulary     | {len(tok.vocab):,} tokens, the longest: {longest}')

def read_meta(folder):
    """Returns meta.json of a data folder, or one made for nanoGPT's folders (train.bin, val.bin), which lack it."""
    if not (folder / 'train.bin').exists():
        return read_json(folder / 'meta.json')
    ids = np.fromfile(folder / 'train.bin', '<u2', 1 << 20)
    is_wide = ids[1::2].max(initial=0) < 16 <= ids.max(initial=0)       # odd ones are the high halves of 32-bit ids
    splits = {split: dict(shards=[dict(name=f'{split}.bin')]) for split in ('train', 'val')}
    return dict(splits, dtype='<u4' if is_wide else '<u2', vocab_size=1 << 20)          # check_data finds the size

def check_data(folder, meta):
    """
    Checks the files against meta, and all ids against the vocabulary. Returns meta, completed for new folders and
    nanoGPT's. checked.json keeps the results, so only changed shards are read again. Raises UserError.
    """
    cache = folder / 'checked.json'
    known = {}
    with suppress(UserError):           # if it is missing or damaged
        known = read_json(cache)
    shards = meta['train']['shards'] + meta['val']['shards']
    file = folder / 'tokenizer.json'
    try:
        if 'tokenizer_sha256' in meta and file_sha256(file) != meta['tokenizer_sha256']:
            raise ValueError('it does not fit the tokens')
        for shard in shown(shards, 'checking'):
            file = folder / shard['name']
            stamp = stamp_of(file)
            if stamp not in known:
                known[stamp] = check_shard(file, meta['dtype'], meta['vocab_size'])
                with suppress(OSError):     # A read-only folder is checked every time
                    cache.write_text(json.dumps(known))
            if not shard.items() <= known[stamp].items():
                raise ValueError('it does not match meta.json')
            shard.update(known[stamp])
    except (OSError, ValueError) as e:
        raise UserError(f'cannot train on {folder} ({file.name}: {e}); copy or prepare the folder again')
    largest = max(shard['largest'] for shard in shards)
    meta['ids'] = largest + 1
    if 'source' not in meta:
        is_gpt2 = 50_000 <= largest < 50257
        meta.update(vocab_size=50257 if is_gpt2 else largest + 1, eot=50256 if is_gpt2 else None,
                    source=f'ids up to {largest:,}, without meta.json' + ", assumed to be GPT-2's" * is_gpt2)
    return meta

def stamp_of(path):         # A copy's inode differs
    info = path.stat()
    return f'{path.name} {info.st_size} {info.st_mtime_ns} {info.st_ino}'

def check_shard(path, dtype, vocab_size):
    """Returns the entry of a shard in meta.json. Raises ValueError if an id is outside the vocabulary."""
    ids = np.memmap(path, dtype, 'r')
    largest = int(ids.max())
    if largest >= vocab_size:
        raise ValueError(f'it has the id {largest}, but the vocabulary has {vocab_size:,} tokens')
    return dict(name=path.name, tokens=len(ids), sha256=file_sha256(path), largest=largest)

def data_hash(meta):
    """Returns eight hex digits that identify the tokens of both splits."""
    shas = [shard['sha256'] for shard in meta['train']['shards'] + meta['val']['shards']]
    return joint_sha256(shas)[:8]

# -----------------------------------------------------------------------------
# Reading shards. A split's tokens are in several .bin files, which meta.json lists.

class Shards:
    """Reads the shards of a split as one long array of tokens. tok: their tokenizer, if it is known."""
    def __init__(self, folder, split, meta, tok=None):
        self.tok = tok
        shards = meta[split]['shards']
        self.files = [open(folder / shard['name'], 'rb', buffering=0) for shard in shards]
        self.shard_starts = [0, *accumulate(shard['tokens'] for shard in shards)]
        self.dtype = np.dtype(meta['dtype'])

    def __len__(self):
        return self.shard_starts[-1]

    def text_bytes(self, starts, length):
        """
        Returns how many bytes of text the targets of these windows have, for bits per byte: 0 if there is no tokenizer.
        Ids that begin or end a document have none.
        """
        if not self.tok:
            return 0
        ids = np.concatenate([self.read(start + 1, length) for start in starts])
        return len(self.tok.decode_bytes(ids[~np.isin(ids, [self.tok.eot, *self.tok.opening])]))

    def read(self, start, length):
        """Returns tokens[start : start + length], across shards."""
        i = bisect_right(self.shard_starts, start) - 1
        file, width = self.files[i], self.dtype.itemsize
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
        return [int(epoch_order(seed, i // n, n, T)[i % n]) for i in range(first, first + count)]

    def batch(self, starts, T, device='cpu'):
        """Returns the sequences at these starts as idx and targets, (B, T) int64 on a device, views of one tensor."""
        import torch        # not needed to prepare data
        x = torch.from_numpy(np.array([self.read(start, T + 1) for start in starts], np.int64))
        if 'cuda' in device:
            x = x.pin_memory()
        x = x.to(device, non_blocking='cuda' in device)
        return x[:, :-1], x[:, 1:]

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
    folder = find_or_prepare(dataset, tokenizer, vocab_size)
    check_data(folder, read_meta(folder))
    print(f'ready: {folder}')
    return folder

if __name__ == '__main__':
    launch(main)
