"""
Byte-pair encoding, first in its plainest form, then as a Tokenizer; and other tokenizers.

    vocab, merges = train_bpe('input.txt', vocab_size=1000, special_tokens=['<|endoftext|>'])
    tok = Tokenizer(vocab, merges, ['<|endoftext|>'])
    tok.encode('hello world')          # [259, 400, ...]
    tok.decode(tok.encode('héllo'))    # 'héllo'
    tok.save('tokenizer.json')         # opens in Hugging Face `tokenizers` and `transformers` as is

A pattern splits text into words, and a word is a sequence of bytes. Training merges the most frequent pair of neighbors
into a new token, again and again (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2). Encoding applies the
same merges, earliest first. The first section does all of that in fifty lines, the later ones with arrays.
"""
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
from bisect import insort
from collections import Counter, defaultdict, deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import cache, partial
from itertools import chain, islice, product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import regex

from configurator import UserError, read_json

END_OF_TEXT = '<|endoftext|>'
BYTES = [bytes([b]) for b in range(256)]
EDGE = -1                   # the id before and after each word
NO_ID = 2 ** 31 - 1         # stands for the token of a pair that is never merged

# How text is split into words, which no token crosses. Before you add a pattern, read the comment above cut_table.
PATTERNS = {
    'gpt2': r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    'gpt4': r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
            r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
}

# -----------------------------------------------------------------------------
# the algorithm in its plainest form; the tests compare everything below with it

def plain_words(text, pattern):
    """Returns the words of a text, each as a list of single bytes."""
    return [[BYTES[b] for b in word.encode()] for word in regex.findall(PATTERNS[pattern], text)]

def plain_merge(word, pair):
    """Joins each occurrence of a pair, from the left: plain_merge(['a', 'a', 'a'], ('a', 'a')) -> ['aa', 'a']"""
    out = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out

def plain_train(text, num_merges, pattern='gpt2'):
    """Returns the merges of byte-level BPE in order: the most frequent pair first; ties go to the greater pair."""
    words = plain_words(text, pattern)
    merges = []
    while len(merges) < num_merges:
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        words = [plain_merge(word, best) for word in words]
        merges.append(best)
    return merges

def plain_encode(text, merges, pattern='gpt2'):
    """Returns the tokens (as bytes) of a text: applies the merges to each word, in the order of training."""
    tokens = []
    for word in plain_words(text, pattern):
        for pair in merges:
            word = plain_merge(word, pair)
        tokens += word
    return tokens

# -----------------------------------------------------------------------------
# tokenizers: special tokens, encoding, decoding

def special_pattern(special_tokens, form=str):
    """Returns a pattern that splits str (or bytes) at special tokens, longest first (without tokens: nowhere)."""
    tokens = sorted(special_tokens, key=len, reverse=True)
    text = '|'.join(map(re.escape, tokens)) or r'\0(?!)'         # this never matches, and \0 is found fast
    return re.compile(f'({text})' if form is str else f'({text})'.encode())

BATCH = 1 << 14     # arrays joined and pieces encoded at once, so that they stay in the processor's cache

class Ragged:
    """
    Short arrays of one dtype, end to end in `flat`; `size` has the length of each. The bytes of the tokens 'a', 'bc'
    and 'd' have flat 'abcd' and size [1, 2, 1].
    """
    def __init__(self, flat, size):
        self.flat = flat
        self.size = np.asarray(size)
        self.begin = np.cumsum(size) - size

    def join(self, index):
        """Returns the arrays with these numbers end to end: [1, 0, 1] joins 'bc', 'a' and 'bc' to 'bcabc'."""
        parts = [self.flat[:0]]
        for i in range(0, len(index), BATCH):
            part = index[i:i + BATCH]
            size = self.size.take(part)
            begin = np.cumsum(size) - size          # of each array in the result
            shift = np.repeat(self.begin.take(part) - begin, size)      # from there to the same element in flat
            parts.append(self.flat.take(np.arange(len(shift)) + shift))
        return np.concatenate(parts)

class BaseTokenizer:
    """The base of all tokenizers. Subclasses call set_vocab, and define encode_ordinary and as_json or save."""
    opening = []        # ids before every prompt, such as Llama's <s>
    merges = ()         # of BPE

    def set_vocab(self, vocab, special_tokens):
        """Sets the vocabulary, {id: bytes} or its items, and adds the special tokens that it lacks."""
        self.vocab = dict(vocab)
        self.id_of = {token: id for id, token in self.vocab.items()}
        self.special_ids = {}
        for token in special_tokens or ():
            id = self.id_of.setdefault(token.encode(), len(self.vocab))
            self.special_ids[token] = id
            self.vocab[id] = token.encode()
        self.special = special_pattern(self.special_ids)
        self.eot = self.special_ids.get(END_OF_TEXT)
        self.vocab_size = len(self.vocab)
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        tokens = [self.vocab[id] for id in range(self.vocab_size)]
        self.token_bytes = Ragged(np.frombuffer(b''.join(tokens), np.uint8), [*map(len, tokens)])

    def encode(self, text):
        """Returns the ids of a text as a list. Special tokens get their own ids; the longest match wins."""
        ids = []
        for part in self.special.split(text):           # ordinary text and special tokens in turn
            if part in self.special_ids:
                ids.append(self.special_ids[part])
            else:
                ids += self.encode_ordinary(part)
        return ids

    def decode(self, ids):
        """Returns the text of ids. Bytes that are not UTF-8 (half a character) become U+FFFD."""
        return self.decode_bytes(ids).decode(errors='replace')

    def decode_bytes(self, ids):
        """Returns the bytes of ids (a sequence; an array is fastest). Raises ValueError for an unknown id."""
        ids = np.asarray(ids)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ValueError(f'some of these ids are outside the vocabulary of {self.vocab_size} tokens: {ids}')
        # The next line gives b''.join([self.vocab[id] for id in ids]), but faster.
        return self.token_bytes.join(ids).tobytes()

    def encode_to_numpy(self, text):
        """Returns encode(text) as an array of uint16 (uint32 if vocab_size > 65,536)."""
        return np.array(self.encode(text), self.dtype)

    def encode_bytes(self, raw, special=()):
        """Returns the ids of UTF-8 bytes as an array. Each 0xff, never in UTF-8, becomes the next id of `special`."""
        first, *others = raw.split(b'\xff')
        ids = self.encode_ordinary(first.decode())
        for id, part in zip(special, others, strict=True):
            ids += [id, *self.encode_ordinary(part.decode())]
        return np.array(ids, self.dtype)

    def save(self, path):
        """Writes tokenizer.json in the format of Hugging Face `tokenizers`."""
        Path(path).write_bytes(json.dumps(self.to_json(), ensure_ascii=False, indent=1).encode())

    def to_json(self):
        """Returns the contents of tokenizer.json."""
        pre_tokenizer, model, decoder = self.as_json()
        added = [dict(id=id, content=self.vocab[id].decode(), single_word=False, lstrip=False, rstrip=False,
                      normalized=False, special=True) for id in sorted(self.special_ids.values())]
        return dict(version='1.0', truncation=None, padding=None, added_tokens=added, normalizer=None,
                    pre_tokenizer=pre_tokenizer, post_processor=None, decoder=decoder, model=model)

class BPETokenizer(BaseTokenizer):
    """Byte-level BPE: every text can be encoded, and decode(encode(text)) == text."""
    ignore_merges = False       # in tokenizer.json, whether a word that is a token needs no merges

    def __init__(self, vocab, merges, special_tokens=None, pattern='gpt2'):
        """Takes what train_bpe returns, and a key of PATTERNS. Special tokens that vocab lacks get the next ids."""
        self.pattern_name = pattern
        self.pattern = regex.compile(PATTERNS[pattern])
        self.set_vocab(vocab, special_tokens)
        self.merges = merges
        self.byte_ids = [self.id_of[byte] for byte in BYTES]
        self.merged = {(self.id_of[a], self.id_of[b]): self.id_of[a + b] for a, b in merges}
        last = EDGE
        for pair, id in self.merged.items():
            if id <= max(*pair, last):
                raise ValueError('the ids of tokens must be in the order of their merges')
            last = id

    def encode_ordinary(self, text):
        """Returns the ids of a text as a list. Special tokens in it are treated as text."""
        return [id for word in self.pattern.findall(text) for id in self.word_ids(word)]

    def word_ids(self, word):
        """
        Returns the ids of one word: makes the token with the lowest id (of the earliest merge), leftmost first, until
        no pair can be merged. To change this (BPE dropout, say), override it in a subclass of this class, not of
        Tokenizer.
        """
        merged = self.merged.get
        ids = [EDGE, *[self.byte_ids[b] for b in word.encode()], EDGE]
        made = [merged(pair, NO_ID) for pair in zip(ids, ids[1:])]          # what each pair would become
        while (new := min(made)) < NO_ID:
            i = made.index(new)
            ids[i:i + 2] = [new]
            left, _, right = ids[i - 1:i + 2]
            made[i - 1:i + 2] = merged((left, new), NO_ID), merged((new, right), NO_ID)
        return ids[1:-1]

    def as_json(self):
        """Returns the parts of tokenizer.json that depend on the tokenizer: pre_tokenizer, model, decoder."""
        names = {id: printable(token) for id, token in sorted(self.vocab.items())}
        names |= {id: token for token, id in self.special_ids.items()}
        merges = [f'{names[a]} {names[b]}' for a, b in self.merged]          # a space is printed as Ġ
        model = dict(type='BPE', vocab={name: id for id, name in names.items()}, merges=merges,
                     ignore_merges=self.ignore_merges)
        return cut_like(self.pattern_name), model, byte_level()

class WordTokenizer(BPETokenizer):
    """Has no merges, but a token for each byte and for some whole words. Bytes spell the other words."""
    ignore_merges = True

    def word_ids(self, word):
        id = self.id_of.get(word.encode())
        return super().word_ids(word) if id is None else [id]

class CharTokenizer(BaseTokenizer):
    """Has a token for each of the given characters."""
    def __init__(self, characters, special_tokens=(END_OF_TEXT,)):
        self.set_vocab(enumerate(map(str.encode, characters)), special_tokens)
        self.ids = {token.decode(): id for token, id in self.id_of.items()}

    def encode_ordinary(self, text):
        """Returns the id of each character. Raises UserError for one that has no token."""
        try:
            return [self.ids[character] for character in text]
        except KeyError as e:
            raise UserError(f'the vocabulary of characters lacks {e}; leave it out, or use another tokenizer')

    def as_json(self):
        model = dict(type='WordLevel', vocab=self.ids, unk_token='<unk>')        # `tokenizers` requires one
        return split_at(r'[\s\S]', 'Removed', True), model, dict(type='Fuse')

# -----------------------------------------------------------------------------
# long texts, in blocks and on all cores

BLOCK = 1 << 21     # bytes per item of work for a process

# Every pattern ends a word between a letter or digit and a character that is neither. \p{Cs}: an undecoded byte
# (surrogateescape). (?r) searches from the right.
SAFE_CUT = regex.compile(r'(?r)(?<=[\p{L}\p{N}])(?=[^\w\p{N}\p{Cs}])')

def blocks(chunks, size, special_tokens=()):
    """
    Joins UTF-8 chunks, cut anywhere, into blocks of about `size` bytes, cut where no token can cross: at the last
    SAFE_CUT in the last 1,000 bytes, or else after the last special token. A block is empty if there is no such place,
    and a later one is longer.
    """
    special = special_pattern(special_tokens, bytes)
    longest = max([len(token.encode()) for token in special_tokens], default=1)
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        if len(rest) >= size:
            limit = len(rest) - longest         # a special token that begins after it may be incomplete
            cut = max([match.end() for match in special.finditer(rest) if match.start() <= limit], default=0)
            limit = max(cut, limit)
            text = rest[max(cut, limit - 1000):limit].decode(errors='surrogateescape')
            if match := SAFE_CUT.search(text):
                cut = limit - len(text[match.start():].encode(errors='surrogateescape'))
            yield bytes(rest[:cut])
            del rest[:cut]
    yield bytes(rest)

def read_blocks(file, path, special_tokens):
    """
    Yields the content of a binary file in blocks, with a 0xff, never in UTF-8, for each special token. Raises UserError
    if it is not text in UTF-8.
    """
    special = special_pattern(special_tokens, bytes)
    offset = 0
    for block in blocks(read_chunks(file, path), BLOCK, special_tokens):
        try:
            block.decode()
        except UnicodeDecodeError as e:
            raise UserError(f'{path} is not text in UTF-8 (see byte {offset + e.start:,}); convert it, for example '
                            f'with iconv -f cp1252 -t utf-8 {shlex.quote(str(path))} > new.txt')
        offset += len(block)
        yield special.sub(b'\xff', block)

def read_chunks(file, path):
    """Yields the content of a binary file as it is read. Raises UserError for a zero byte, because text has none."""
    while chunk := file.read(BLOCK):
        if b'\0' in chunk:
            raise UserError(f'{path} is not text in UTF-8, because it has a zero byte; leave it out, unpack it, or if '
                            f'it is in UTF-16, convert it first')
        yield chunk

# A fork shares what is already imported. A new Python starts where fork is missing (Windows) or unsafe (macOS).
START_METHOD = 'fork' if sys.platform == 'linux' else 'spawn'

# Up to this many blocks, starting processes takes longer than it saves. On two cores, a block takes 0.1 s of CPU time,
# a fork almost nothing, and a new Python 0.4 s.
SMALL = 2 if START_METHOD == 'fork' else 8

def default_workers():
    """Returns the number of cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return min(os.cpu_count(), 61)          # the most processes that Windows waits for at once

def parallel_map(function, items, workers):
    """
    Computes map(function, items) in order, in other processes if there are over SMALL items, a few at a time. workers:
    the number of processes (0 or None: one per core). The function must be one of this file.
    """
    workers = workers or default_workers()
    items = iter(items)
    first = list(islice(items, max(workers, SMALL + 1)))
    items = chain(first, items)
    workers = min(workers, len(first))
    if workers == 1 or len(first) <= SMALL:
        yield from map(function, items)
        return
    context = multiprocessing.get_context(START_METHOD)
    # A new Python would run the launched script again, but functions of this file do not need it. So it starts without
    # torch, and a script needs no `if __name__ == '__main__'`.
    without_script = patch.multiple(sys.modules['__main__'], create=True, __file__=None, __spec__=None)
    try:
        with without_script, ProcessPoolExecutor(workers, context, set_work, (function,)) as pool:
            try:
                futures = (pool.submit(work, item) for item in items)
                waiting = deque(islice(futures, workers + 2))
                while waiting:
                    waiting.extend(islice(futures, 1))          # one more, if there is one
                    yield waiting.popleft().result()
            except BaseException:       # such as Ctrl-C: if the pool waited for them, a second one would make it hang
                for process in multiprocessing.active_children():
                    process.kill()
                raise
    except OSError as e:
        raise UserError(f'cannot use {workers} workers ({e}); use --workers=1, or run ulimit -n 4096 first')
    except BrokenExecutor:
        raise UserError(f'one of {workers} workers was killed, perhaps because memory ran out; use --workers=1')

def set_work(function):
    """Runs once in each new process, so that the function (which may hold a tokenizer) is sent once, not per item."""
    global work_function
    work_function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C is the parent's to handle
    threading.Thread(target=end_with_parent, daemon=True).start()

def end_with_parent():
    """Ends a worker whose parent was killed; it would wait for work forever."""
    multiprocessing.parent_process().join()
    os._exit(1)

def work(item):
    return work_function(item)

def encode_batch(tok, batch):
    """Returns a batch's split, ids, and counts for meta.json. A batch is a split and bytes as prepare.py joins them."""
    split, raw = batch
    ends = raw.count(b'\xff')
    between = [tok.eot, *tok.opening]       # write_shards adds the first document's opening
    ids = tok.encode_bytes(raw.replace(b'\xff', b'\xff' * len(between)), between * ends)
    return split, ids, dict(documents=ends, bytes=len(raw) - ends)

# -----------------------------------------------------------------------------
# splitting text without a Python object per word: 400 MB/s per core; regex.findall reaches 10 to 20 MB/s
#
# Text is cut into pieces wherever two neighboring characters show that the pattern ends a word. With GPT-2's,
# [say "it's"] becomes [say] [ "] [it] ['s] ["]. Only distinct pieces that may be several words (such as ['so], because
# ['s] is a word) go to the pattern.

# The class of a character is a number. No character is a SEPARATOR. The classes from OTHER on have these members; each
# takes characters from those before it, so that UNSURE is left with white space beyond ASCII.
SEPARATOR, OTHER, UNSURE = range(3)
MEMBERS = r'[\s\S]+', r'\s+', r'[\t-\r]+', ' ', r'[\r\n]+', r'\p{L}+', r'\p{N}+', "'"

@cache
def class_tables():
    """
    Returns the class of each code point, and that of each byte for bytes.translate: bytes beyond ASCII are a SEPARATOR,
    like 0xff, which separates texts because UTF-8 never has it.
    """
    text = np.arange(0x110000, dtype='<u4').tobytes().decode('utf-32-le', 'surrogatepass')
    of_char = np.zeros(0x110000, np.uint8)
    for kind, members in enumerate(MEMBERS, OTHER):
        for match in regex.finditer(members, text):
            of_char[match.start():match.end()] = kind
    return of_char, of_char[:128].tobytes() + bytes([SEPARATOR]) * 128

EXAMPLES = "slx 7!\t\n'\u3000"      # of every class but SEPARATOR
BETWEEN, BEFORE = 1, 2              # where to cut: between two neighbors, before the first of them

# A new pattern needs a row in PATTERNS, its name in the comment of the option in prepare.py, and one for GGUF in
# add_tokens of sample.py. The functions here rely on this: runs of a class are a unit (cut_table), letters in a row,
# with or without a space before them, are one word (split_pieces), and words end at SAFE_CUT. The tests try every
# pattern.

@cache
def cut_table(pattern):
    """
    Returns a table for bytes.translate: entry 16 a + b says where to cut at neighbors of classes a and b, as a sum of
    BETWEEN and BEFORE. A cut of a text is right if its two sides have the words of the text. Neighbors get the cuts
    that are right in all texts of three EXAMPLES. With GPT-2's pattern, a comma and a space are cut BETWEEN the two.
    Two spaces are cut only if a word follows, as in [ ] [ a], which is a cut BEFORE ' ' and 'a'.
    """
    of_char, _ = class_tables()
    class_of = {character: of_char[ord(character)] for character in EXAMPLES}
    find = regex.compile(PATTERNS[pattern]).findall
    table = np.full((16, 16), BETWEEN + BEFORE)
    for a, b, c in product(EXAMPLES, repeat=3):
        if find(a) + find(b + c) != find(a + b + c):
            table[class_of[a], class_of[b]] &= ~BETWEEN
            table[class_of[b], class_of[c]] &= ~BEFORE

    table[UNSURE] = 0           # has several bytes; a cut before the last would be inside the character
    table[SEPARATOR] = table[:, SEPARATOR] = BETWEEN
    return bytes(table.flat)

def classes(raw):
    """Returns the class of each byte's character in UTF-8: classes(' aé'.encode()) -> [4, 6, 6, 6]"""
    of_char, of_byte = class_tables()
    kinds = np.frombuffer(bytearray(raw.translate(of_byte)), np.uint8)
    if raw.isascii():
        return kinds
    raw = np.frombuffer(raw, np.int8)
    places = np.flatnonzero(raw < -1)           # bytes beyond ASCII, except 0xff
    code = np.frombuffer(raw[places].tobytes().decode().encode('utf-32-le'), '<u4')
    size = 2 + (code > 0x7FF) + (code > 0xFFFF)
    kinds[places] = np.repeat(of_char[code], size)
    return kinds

def cuts(raw, pattern):
    """Returns where pieces of UTF-8 begin, with two look-ups per byte: cuts(b'it is', 'gpt2') -> [0, 2]"""
    kinds = classes(raw)
    neighbors = kinds[:-1] << 4 | kinds[1:]
    cut = np.frombuffer(neighbors.tobytes().translate(cut_table(pattern)), np.uint8)
    begins = np.ones(len(raw), bool)
    begins[1:] = cut & BETWEEN
    begins[1:-1] |= cut[1:] >= BEFORE
    return np.flatnonzero(begins)

def split_pieces(pieces, pattern):
    """Yields the words of each piece, joined by 0xff: b' so' -> b' so', and b"'so" -> b"'s\\xffo"."""
    findall = regex.compile(PATTERNS[pattern]).findall
    for piece in pieces:
        text = piece.decode()
        if text.removeprefix(' ').isalpha():        # most are one word
            yield piece
        else:
            yield b'\xff'.join(map(str.encode, findall(text)))

# -----------------------------------------------------------------------------
# numbering pieces with a hash table in numpy, where every step is taken for all keys at once

class Index:
    """
    Numbers distinct keys (rows of two uint64) from 1. slots[hash of a key] holds its number, and keys[number] the key;
    if another key has that slot, the next free one is used: two keys with the hash 7 are in the slots 7 and 8. Takes
    6 ns per key; a dict of bytes takes 100.
    """
    def __init__(self):
        self.slots = np.zeros(1024, np.int32)           # three quarters are free, with number 0
        self.keys = np.zeros((256, 2), np.uint64)
        self.size = 1

    def hash(self, keys):
        """Returns the slot where to look for each key first: the upper bits of a product."""
        mixed = (keys[:, 1] * 0xC2B2AE3D27D4EB4F ^ keys[:, 0]) * 0x9E3779B97F4A7C15
        return (mixed >> 65 - len(self.slots).bit_length()).view(np.int64)

    def find(self, keys, slot=None):
        """Returns the number of each key, 0 if it is missing. `slot` is where to look, if not at its hash."""
        if slot is None:
            slot = self.hash(keys)
        number = self.slots.take(slot, mode='wrap')
        differs = self.keys.take(number, axis=0) != keys
        other = np.flatnonzero((differs[:, 0] | differs[:, 1]) & (number != 0))
        if len(other):
            number[other] = self.find(keys[other], slot[other] + 1)
        return number

    def add(self, keys):
        """Numbers keys that are new and distinct."""
        first = self.size
        self.size += len(keys)
        if 4 * self.size > len(self.slots):         # grow, and insert all keys again
            self.slots = np.zeros(1 << (4 * self.size).bit_length(), np.int32)
            self.keys = np.resize(self.keys, (len(self.slots) // 4, 2))
            first = 1
        self.keys[self.size - len(keys):self.size] = keys

        number = np.arange(first, self.size, dtype=np.int32)[::-1]
        slot = self.hash(self.keys[number])
        while len(number):
            free = self.slots[slot] == 0
            self.slots[slot[free]] = number[free]       # of several keys, the first (most frequent) gets the slot
            left = self.slots[slot] != number
            number = number[left]
            slot = (slot[left] + 1) % len(self.slots)

WINDOW = 1 << 17        # bytes worked on at once, so that they stay in the processor's cache

# OR with row n keeps the first n of 16 bytes and makes the others 0xff.
PADDING = np.triu(np.full((17, 16), 0xff, np.uint8)).view('<u8')

class Pieces:
    """
    Numbers the distinct pieces of texts. `all` lists them by number; 0 is none and 1 the separator 0xff. The key of a
    piece of up to 15 bytes is the piece itself, padded with 0xff to 16 bytes. That of a longer one is its number in
    `long` and its bytes 9 to 16, which do not end with 0xff.
    """
    def __init__(self, pattern):
        self.pattern = pattern
        self.index = Index()
        self.long = {}
        self.all = [b'']
        self.numbers(b'\xff')

    def read(self, raw):
        """Returns the numbers of the pieces of UTF-8 bytes, in order. New pieces get the next numbers."""
        parts = (raw[i:i + WINDOW] for i in range(0, len(raw), WINDOW))
        return np.concatenate([*map(self.numbers, blocks(parts, WINDOW))])

    def keys(self, window, begin, size):
        """Returns the keys of the pieces that begin at these positions of a window and have these sizes."""
        next_16 = np.ndarray(len(window), 'V16', window + bytes(16), strides=1)     # item i is window[i:i + 16]
        keys = next_16[begin].view('<u8').reshape(-1, 2)
        keys |= PADDING.take(size, axis=0, mode='clip')
        long = np.flatnonzero(size > 15)
        found = slices(window, begin[long], size[long])
        keys[long, 0] = [self.long.setdefault(piece, len(self.long)) for piece in found]
        return keys

    def numbers(self, window):
        """Returns the numbers of the pieces of a part of a text."""
        begin = cuts(window, self.pattern)
        size = np.diff(begin, append=len(window))
        keys = self.keys(window, begin, size)
        number = self.index.find(keys)
        new = np.flatnonzero(number == 0)
        while len(new):
            # A piece may be new in several places, so add the first of each hash. Other pieces with that hash follow in
            # the next round.
            _, first = np.unique(self.index.hash(keys[new]), return_index=True)
            first = new[np.sort(first)]
            self.index.add(keys[first])
            self.all += slices(window, begin[first], size[first])
            number[new] = self.index.find(keys[new])
            new = new[number[new] == 0]
        return number

def slices(raw, begin, size):
    """Returns raw[i:i + n] for each begin i and size n."""
    return [raw[i:i + n] for i, n in zip(begin.tolist(), size.tolist())]

# -----------------------------------------------------------------------------
# training: count distinct words, then merge several pairs at a time in them

def count_pieces(pieces, raw):
    """
    Counts the pieces of UTF-8 bytes. Every process has a copy of `pieces`, and numbers those that it meets. Returns the
    process, the pieces that are new to it, and the count of each of its pieces. The separator has none. For 'a b b', it
    returns (41, [b'a', b' b'], [1, 2]), and then for ' b c', (41, [b' c'], [0, 1, 1]).
    """
    known = len(pieces.all)
    numbers = pieces.read(raw)
    return os.getpid(), pieces.all[known:], np.bincount(numbers, minlength=len(pieces.all))[2:]

def count_words(texts, pattern, workers=None):
    """Counts words in an iterable of UTF-8 bytes. No word crosses a 0xff. Returns {word as bytes: count}."""
    pieces, counts = defaultdict(list), {}          # of each process
    for process, new, count in parallel_map(partial(count_pieces, Pieces(pattern)), texts, workers):
        count[:len(pieces[process])] += counts.get(process, 0)
        counts[process] = count
        pieces[process] += new
    total = defaultdict(int)
    for process in pieces:
        for piece, n in zip(split_pieces(pieces[process], pattern), counts[process].tolist()):
            for word in piece.split(b'\xff'):
                total[word] += n
    return total

def train_bpe(input_path, vocab_size, special_tokens=(), pattern='gpt2', workers=None):
    """
    Trains byte-level BPE on a text file. Returns (vocab, merges). vocab is {id: bytes}: the 256 bytes, a token per
    merge (fewer if the text runs out of pairs), then the special tokens, which no merge crosses. merges is [(bytes,
    bytes)] in order: the most frequent pair first; ties go to the greater pair. Raises UserError.
    """
    special_tokens = [*dict.fromkeys(special_tokens or ())]
    check_vocab_size(vocab_size, special_tokens)
    with open(input_path, 'rb') as file:
        counts = count_words(read_blocks(file, input_path, special_tokens), pattern, workers)
    return merge_words(counts, vocab_size, special_tokens)

def check_vocab_size(vocab_size, special_tokens):
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UserError(f'vocab_size = {vocab_size} does not hold the bytes and special tokens; use at least {least}')

def merge_words(counts, vocab_size, special_tokens=()):
    """Returns what train_bpe does, from {word as bytes: count}. Equal to plain_train."""
    state = Merging(counts, vocab_size - len(special_tokens))
    while batch := state.next_batch():
        state.merge(batch)
    tokens = state.vocab + [token.encode() for token in special_tokens]
    return dict(enumerate(tokens)), state.merges

def every_other(at, length):
    """
    Returns where to merge a pair of equal tokens of this length, which overlap in aaaa. Of a run of places at that
    distance, every other one is kept: every_other([3, 4, 5, 9], 1) -> [3, 5, 9]
    """
    index = np.arange(len(at))
    new_run = np.diff(at, prepend=0) != length
    start = np.maximum.accumulate(index * new_run)      # index of the first pair in the run of each
    return at[(index - start) % 2 == 0]

LOW = (1 << 32) - 1     # a pair of ids is one integer: a << 32 | b

def group_pairs(a, b, weight):
    """Returns an order that groups equal pairs of ids without an EDGE, and each group's begin, pair and weight."""
    pairs = a.astype(int) << 32 | b
    inside = np.flatnonzero(pairs >= 0)         # EDGE is -1, so it makes a pair negative
    order = inside[np.argsort(pairs[inside])]
    pairs, begin = np.unique(pairs[order], return_index=True)
    return order, begin, pairs, np.add.reduceat(weight[order], begin)

class Merging:
    """
    The state of training. The result is plain_train's, but a merge touches only the places of its pair, and about
    twenty pairs are merged at once, which is five times as fast as one at a time.

    Words are stored end to end, with a place for each byte and an EDGE around each word: 'ab' and 'abc' are EDGE a b
    EDGE a b c EDGE. A token is stored at the place of its first byte: its id in `ids`, the places of its neighbors in
    `next` and `previous`.

    Pairs are numbered from 1. Pair n is `pair_ids[n]` (a << 32 | b for the ids a and b), was found at the places
    `places[end[n - 1]:end[n]]` (1 and 4 for ab), and is still at those where `pair_at[place]` is n. `count[n]` is its
    frequency in the text, always up to date. All places of a pair are found when the younger of its tokens is made.

    The pool holds (count, bytes, bytes, number) for each pair with a count >= `floor`, sorted, the best at the end. A
    count in it may be too high until it comes up.
    """
    def __init__(self, counts, max_tokens):
        self.merges = []
        self.vocab = [*BYTES]
        self.max_tokens = max_tokens
        self.ids = np.frombuffer(b'\xff'.join([b'', *counts, b'']), np.uint8).astype(np.int32)
        edges = np.flatnonzero(self.ids == 0xff)
        self.ids[edges] = EDGE
        n = len(self.ids)
        self.next = np.arange(1, n + 1)
        self.previous = self.next - 2
        self.weight = np.repeat([0, *counts.values()], np.diff(edges, prepend=-1))

        # A merge at a place removes a token and adds at most two pairs, so 3 n is room for all.
        self.num_pairs = 1          # number 0 stands for no pair
        self.places = np.zeros(3 * n, np.int32)
        self.pair_ids, self.end, self.count = np.zeros((3, 3 * n), int)
        self.pair_at = np.zeros(n, np.int32)
        self.pool = []
        self.floor = 1 << 62        # nothing enters the pool before it is filled
        self.number_pairs(np.arange(n - 1))

    def number_pairs(self, at):
        """Numbers the pairs that begin at these places; all of them are new."""
        order, begin, pairs, count = group_pairs(self.ids[at], self.ids[self.next[at]], self.weight[at])
        at = at[order]
        size = np.diff(begin, append=len(at))
        start = self.end[self.num_pairs - 1]        # of their places

        number = np.arange(self.num_pairs, self.num_pairs + len(pairs))
        self.num_pairs += len(pairs)
        self.pair_ids[number] = pairs
        self.count[number] = count
        self.end[number] = start + begin + size
        self.places[start:start + len(at)] = at
        self.pair_at[at] = np.repeat(number, size)
        for entry in self.entries(number[count >= self.floor]):
            insort(self.pool, entry)

    def entries(self, number):
        """Returns the pool's entries for the pairs with these numbers."""
        rows = zip(self.count[number].tolist(), self.pair_ids[number].tolist(), number.tolist())
        return [(count, self.vocab[pair >> 32], self.vocab[pair & LOW], n) for count, pair, n in rows]

    def refill(self):
        """Fills the empty pool with the pairs that count at least half as much as the best one."""
        count = self.count[:self.num_pairs]
        self.floor = max(1, count.max() // 2)
        self.pool = sorted(self.entries(np.flatnonzero(count >= self.floor)))

    def next_batch(self):
        """
        Takes the best pairs from the pool, until one begins with a token that another ends with, or the reverse. So no
        merge changes the count of another.
        """
        batch, firsts, seconds = [], set(), set()
        while len(batch) < self.max_tokens - len(self.vocab):
            if not self.pool and not batch:
                self.refill()
            if not self.pool:
                break
            count, x, y, number = entry = self.pool.pop()
            now = int(self.count[number])
            if now < count:
                if now >= self.floor:
                    insort(self.pool, (now, x, y, number))
            elif x in seconds or y in firsts:
                self.pool.append(entry)
                break
            else:
                batch.append(entry)
                firsts.add(x)
                seconds.add(y)
        return batch

    def merge(self, batch):
        """Merges the pairs of a batch, up to the first that is overtaken."""
        old = len(self.vocab)
        places = [self.places_of(x, y, number) for _, x, y, number in batch]
        at = np.concatenate(places)
        new = np.repeat(np.arange(old, old + len(batch)), [*map(len, places)])
        # No other pair makes the same token, because its bytes were merged alike everywhere.
        self.vocab += [x + y for _, x, y, _ in batch]

        stop = self.overtaken(batch, at, new)
        del self.vocab[old + stop:]
        self.pool += reversed(batch[stop:])
        self.merges += [(x, y) for _, x, y, _ in batch[:stop]]
        kept = new < old + stop
        at, new = at[kept], new[kept]

        # In l x y r, the token xy takes the place of x; then (l, xy) and (xy, r) take those of (l, x) and (x, y).
        middle = self.next[at]
        right = self.next[middle]
        self.ids[at] = new
        self.next[at] = right
        self.previous[right] = at
        left = self.previous[at]
        left = left[self.ids[left] < old]          # count the pair between two new tokens once
        changed = np.append(left, at)
        gone = np.append(changed, middle)
        np.subtract.at(self.count, self.pair_at[gone], self.weight[gone])
        self.pair_at[gone] = 0
        self.number_pairs(changed)

    def places_of(self, x, y, number):
        """Returns where to merge the pair of the tokens x and y."""
        at = self.places[self.end[number - 1]:self.end[number]]
        at = at[self.pair_at[at] == number]
        return every_other(np.sort(at), len(x)) if x == y else at

    def overtaken(self, batch, at, new):
        """
        Returns how many pairs of the batch to merge: those that come before every pair that an earlier one makes (its
        new token with a neighbor). If the batch has (a, b) 9 times and (x, y) 7 times, and abc occurs 8 times, then
        merging (a, b) makes (ab, c) 8 times. It comes before (x, y), so only one pair is merged. A right neighbor is
        seen as it was: (ab, c) for (ab, cd), which sorts just above it.
        """
        left = self.ids[self.previous[at]]
        right = self.ids[self.next[self.next[at]]]
        _, _, pairs, count = group_pairs(np.append(left, new), np.append(new, right), np.tile(self.weight[at], 2))
        near = count >= batch[-1][0]
        old, stop = len(self.vocab) - len(batch), len(batch)
        for n, pair in zip(count[near].tolist(), pairs[near].tolist()):
            a, b = pair >> 32, pair & LOW
            entry = n, self.vocab[a], self.vocab[b]
            maker = max(a, b) - old         # the younger token is new
            while stop > maker + 1 and batch[stop - 1][:3] < entry:
                stop -= 1
        return stop

# -----------------------------------------------------------------------------
# encoding and decoding with arrays

LONG_TEXT = 3000        # a text of more characters is faster with arrays (20 take 45 us with arrays, 2 without)
MAX_WORDS = 1 << 18     # most words in a dict
MAX_IDS = 1 << 20       # most ids in a table

class WordIds(dict):
    """The ids of words, computed when they are first needed, for a limited number of words."""
    def __init__(self, word_ids):
        self.word_ids = word_ids

    def __missing__(self, word):
        if len(self) >= MAX_WORDS:
            self.clear()
        return self.setdefault(word, self.word_ids(word))

def ascii_form(pattern):
    """Returns the pattern for ASCII text in the syntax of `re`, which is twice as fast as regex."""
    pattern = pattern.replace(r'\p{L}+', '[A-Za-z]+').replace(r'\p{L}', 'A-Za-z')       # the latter is in brackets
    return '(?a)' + pattern.replace(r'\p{N}', r'\d')

class Tokenizer(BPETokenizer):
    """
    Computes a BPETokenizer's ids in one of two ways. A short text is split in Python, and WordIds has the ids of words.
    For a long one, a table has the ids of all Pieces seen before, and new pieces are merged together.
    """
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.find_ascii = re.compile(ascii_form(self.pattern.pattern)).findall
        self.words = WordIds(self.word_ids)
        self.tables = []        # of Pieces and a Ragged of their ids
        self.byte_array = np.array(self.byte_ids[:0xff] + [EDGE], np.int32)
        self.pairs = Index()        # of ids that are merged, and what each becomes by its number
        self.pairs.add(np.array([*self.merged], np.uint64).reshape(-1, 2))
        self.merged_array = np.array([NO_ID, *self.merged.values()], np.int32)

    def __init_subclass__(cls):
        raise TypeError('make a subclass of BPETokenizer instead, because this class does not call word_ids every time')

    def encode(self, text):
        return self.encode_to_numpy(text).tolist() if len(text) > LONG_TEXT else super().encode(text)

    def encode_to_numpy(self, text):
        """Returns encode(text) as an array, which is fastest for a long text."""
        parts = self.special.split(text)
        raw = b'\xff'.join(map(str.encode, parts[::2]))
        return self.encode_bytes(raw, [self.special_ids[token] for token in parts[1::2]])

    def encode_ordinary(self, text):
        if len(text) > LONG_TEXT:
            return self.encode_bytes(text.encode()).tolist()
        find = self.find_ascii if text.isascii() else self.pattern.findall
        return [*chain.from_iterable(map(self.words.__getitem__, find(text)))]

    def encode_bytes(self, raw, special=()):
        separator = self.byte_ids[0xff]         # no text has its id
        # Threads must not share a table. So a call takes one from the list (or makes one), and puts it back at the end.
        try:
            pieces, table = self.tables.pop()
        except IndexError:
            pieces = Pieces(self.pattern_name)
            table = Ragged(np.array([separator], self.dtype), [0, 1])       # of the pieces b'' and 0xff

        numbers = pieces.read(raw)
        for i in range(len(table.size), len(pieces.all), BATCH):
            flat, size = self.ids_of_pieces([*split_pieces(pieces.all[i:i + BATCH], self.pattern_name)])
            table = Ragged(np.append(table.flat, flat), np.append(table.size, size))

        ids = table.join(numbers)
        ids[ids == separator] = special
        if len(table.flat) < MAX_IDS:
            self.tables.append((pieces, table))
        return ids

    def merge_pairs(self, a, b):
        """Returns the id of the token that each pair of ids becomes, or NO_ID."""
        return self.merged_array.take(self.pairs.find(np.stack([a, b], 1).astype(np.uint64)))

    def ids_of_pieces(self, pieces):
        """
        Returns the ids of pieces from split_pieces end to end, and the number of ids of each. A round makes the
        token of lowest id in each word, wherever it can. `at` has the places that are left, and `made` what the pair
        that begins at each would become.
        """
        raw = np.frombuffer(b'\xff'.join([*pieces, b'']), np.uint8)
        ids = self.byte_array[raw]
        edge = ids == EDGE          # one after each word
        made = self.merge_pairs(ids, np.roll(ids, -1))          # NO_ID next to an EDGE
        word_of = np.cumsum(edge) - edge
        at = np.arange(len(raw))
        while True:
            word = word_of[at]
            lowest = np.full(word_of[-1] + 1, NO_ID, np.int32)
            np.minimum.at(lowest, word, made)
            lowest = lowest[word]
            going = lowest < NO_ID              # the other words are done
            first = every_other(np.flatnonzero(going & (made == lowest)), 1)
            if not len(first):
                break
            ids[at[first]] = made[first]
            ids[at[first + 1]] = EDGE
            going[first + 1] = False
            left = np.flatnonzero(going)
            at, made = at[left], made[left]
            first = np.cumsum(going)[first] - 1         # the new ids among the places that are left
            near = np.append(first - 1, first)          # the pairs that end or begin with them
            made[near] = self.merge_pairs(ids[at[near]], ids[at[near + 1]])

        kept = ids != EDGE
        piece_of = np.repeat(np.arange(len(pieces)), [len(piece) + 1 for piece in pieces])
        return ids[kept].astype(self.dtype), np.bincount(piece_of[kept])

# -----------------------------------------------------------------------------
# tokenizer.json, the file format of Hugging Face `tokenizers`

def split_at(pattern, behavior='Isolated', invert=False):
    return dict(type='Split', pattern=dict(Regex=pattern), behavior=behavior, invert=invert)

def byte_level(use_regex=True):         # a decoder ignores it
    return dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=use_regex)

def cut_like(pattern_name):
    """Returns the pre_tokenizer that splits with one of our patterns. ByteLevel has GPT-2's built in."""
    if pattern_name == 'gpt2':
        return byte_level()
    return dict(type='Sequence', pretokenizers=[split_at(PATTERNS[pattern_name]), byte_level(use_regex=False)])

# GPT-2's table: each byte as a printable character, so that a token can be a key in JSON
TO_CHAR = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b == 32 or not chr(b).isprintable())}

def printable(token):
    """printable(b' a') -> 'Ġa'"""
    return token.decode('latin-1').translate(TO_CHAR)

TO_BYTE = {ord(printable(byte)): b for b, byte in enumerate(BYTES)}

def from_printable(token):
    return token.translate(TO_BYTE).encode('latin-1')

ENDS = END_OF_TEXT, '<|end_of_text|>', '</s>'       # tokens with which known models end a document

def find_ends(folder, vocab_size, *known):
    """
    Returns the ids that end a text of the model in a folder: `known` ones, then those in its files, which may also end
    a turn of a chat. In a data folder, meta.json has one. None does not count, nor do ids outside the vocabulary.
    """
    ends = [*known]
    for name in 'config.json', 'generation_config.json', 'meta.json':
        if (folder / name).exists():
            data = read_json(folder / name)
            found = data.get('eos_token_id', data.get('eot'))
            ends += found if isinstance(found, list) else [found]
    ends = [id for id in ends if type(id) is int and 0 <= id < vocab_size]          # some files have -1 for none
    return [*dict.fromkeys(ends)]

def load_tokenizer(path):
    """Loads our own tokenizer.json, or one from Hugging Face with its ids. Also takes its folder. Raises UserError."""
    path = Path(path)
    if path.is_dir():
        path /= 'tokenizer.json'
    if not path.exists():
        raise UserError(f'{path} is missing; put one there, made by prepare.py or by transformers')
    try:
        tok = read_ours(read_json(path)) or ForeignTokenizer(path)
    except Exception as e:      # tokenizers raises plain Exceptions
        raise UserError(f'{path} is not a tokenizer this project can use ({type(e).__name__}: {e}); use one from '
                        f'prepare.py, or, after `pip install tokenizers`, that of most language models')
    tok.eot = next(iter(find_ends(path.parent, tok.vocab_size, *map(tok.special_ids.get, ENDS))), None)
    return tok

# Settings that have no effect on our ids, and merges, which are used as they are
NOT_COMPARED = 'version', 'truncation', 'padding', 'decoder', 'normalized', 'unk_token', 'fuse_unk', 'merges'

def essence(data):
    """Returns the contents of a tokenizer.json without empty settings and those in NOT_COMPARED."""
    return json.loads(json.dumps(data), object_pairs_hook=to_compare)           # of each dict, inner ones first

def to_compare(pairs):
    return {name: value for name, value in pairs if value and name not in NOT_COMPARED}

def read_ours(data):
    """
    Returns our tokenizer with the contents of a tokenizer.json, or None if there is none: it would write another file
    (see essence), because it lacks something that is in this one.
    """
    model, pre_tokenizer = data['model'], data['pre_tokenizer']
    try:
        # Write as we do what others write in another way, or leave out.
        special = {token['content']: token['id'] for token in data['added_tokens']}
        vocab = model['vocab'] = special | model['vocab']
        model.setdefault('type', 'BPE')
        if pre_tokenizer['type'] == 'ByteLevel':
            pre_tokenizer.setdefault('use_regex', True)         # GPT-2's file leaves it out
        if data.get('post_processor') and data['post_processor']['type'] == 'ByteLevel':
            del data['post_processor']                          # it changes no id

        if model['type'] == 'WordLevel':
            tok = CharTokenizer(sorted(vocab, key=vocab.get), special)
        else:
            [pattern] = [name for name in PATTERNS if cut_like(name) == pre_tokenizer]
            tokens = {id: token.encode() if token in special else from_printable(token) for token, id in vocab.items()}
            pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model['merges']]
            merges = [tuple(map(from_printable, pair)) for pair in pairs]
            kind = WordTokenizer if model.get('ignore_merges') else Tokenizer
            tok = kind(tokens, merges, special, pattern)
    except (LookupError, TypeError, ValueError):        # it has what ours never have
        return None
    return tok if essence(tok.to_json()) == essence(data) else None

PROBE = "It's 12  cafés,\n\tin 北京 😀"

class ForeignTokenizer(BaseTokenizer):
    """
    Wraps `tokenizers` for other patterns and spellings (SmolLM's, Qwen's, Llama's). Its normalizer may change a text.
    Raises the package's errors, and ValueError if PROBE does not come back.
    """
    def __init__(self, path):
        from tokenizers import Tokenizer as Theirs
        self.theirs = Theirs.from_file(str(path))
        self.theirs.no_truncation()
        self.theirs.no_padding()
        added = {token.content: id for id, token in self.theirs.get_added_tokens_decoder().items()}
        ids = self.theirs.get_vocab()
        last = max(ids.values())
        if last >= 1 << 24:
            raise ValueError(f'it has the id {last:,}')
        vocab = dict.fromkeys(range(last + 1), b'')
        for token, id in ids.items():
            if '▁' in ids:
                vocab[id] = from_sentencepiece(token)
            else:
                vocab[id] = token.encode() if token in added else from_printable(token)
        self.set_vocab(vocab, [])
        self.special_ids = added
        ids = self.theirs.encode('a').ids
        self.opening = ids[:ids.index(self.encode('a')[0])]         # a template may also add tokens at the end
        if self.decode(self.encode(PROBE)).removeprefix(' ') != PROBE:
            raise ValueError('a text does not come back from its ids')

    def encode(self, text, special_is_text=False):
        self.theirs.encode_special_tokens = special_is_text
        return self.theirs.encode(text, add_special_tokens=False).ids

    def encode_ordinary(self, text):
        return self.encode(text, special_is_text=True)

    def save(self, path):
        self.theirs.save(str(path))

def from_sentencepiece(token):
    """from_sentencepiece('▁a') -> b' a', and '<0x0A>', a byte, is b'\\n'"""
    if re.fullmatch('<0x[0-9A-F]{2}>', token):
        return bytes.fromhex(token[3:-1])
    return token.replace('▁', ' ').encode()
