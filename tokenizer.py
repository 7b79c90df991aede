"""
Byte-pair encoding, from the plainest form to the one that is used, and three simpler tokenizers beside it.

    vocab, merges = train_bpe('input.txt', vocab_size=1000, special_tokens=['<|endoftext|>'])
    tok = Tokenizer(vocab, merges, ['<|endoftext|>'])
    tok.encode('hello world')          # [259, 400, ...]
    tok.decode(tok.encode('héllo'))    # 'héllo'
    tok.save('tokenizer.json')         # Hugging Face `tokenizers` and `transformers` open it as it is

Text is cut into words by a pattern, and a word is a sequence of bytes. Training merges the most frequent pair of
neighbours into a new token, again and again (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2). Encoding
applies the same merges, earliest first. All below the first section does just that, for many words at a time.
"""
import bisect
import functools
import heapq
import json
import os
import re
from collections import Counter
from itertools import chain, count

import numpy as np
import regex

from configurator import UserError, blocks, default_workers, parallel_map, read_blocks, read_json, special_pattern

END_OF_TEXT = '<|endoftext|>'
UNKNOWN = '<unk>'

# how text is cut into words before any merging: no token crosses a cut
PATTERNS = {
    'gpt2': r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    'gpt4': r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
            r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
}

# -----------------------------------------------------------------------------
# the algorithm in its plainest form: the reference that everything below is tested against

def plain_merge(word, pair):
    """Joins a pair wherever it stands, from the left: plain_merge(['a', 'a', 'a'], ('a', 'a')) -> ['aa', 'a']"""
    out, i = [], 0
    while i < len(word):
        if tuple(word[i:i + 2]) == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out

def plain_train(text, num_merges, pattern='gpt2'):
    """The merges of byte-level BPE in order: the most frequent pair first, ties to the greater pair of bytes."""
    words = [[bytes([b]) for b in w.encode()] for w in regex.findall(PATTERNS[pattern], text)]
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
    """The tokens (as bytes) of a text: in each word, join the pair that was merged first in training, and repeat."""
    rank = {pair: i for i, pair in enumerate(merges)}
    tokens = []
    for w in regex.findall(PATTERNS[pattern], text):
        word = [bytes([b]) for b in w.encode()]
        while pairs := [pair for pair in zip(word, word[1:]) if pair in rank]:
            word = plain_merge(word, min(pairs, key=rank.get))
        tokens += word
    return tokens

# -----------------------------------------------------------------------------
# cutting text without a Python object per word: 400 MB/s a core, where regex.findall does 10 to 20
# A piece is what lies between two safe cuts: places where the pattern ends a word whatever stands around. Nearly every
# piece is one word; the pattern itself is only asked about distinct pieces that may not be.

# classes of characters; UNSURE is white space beyond ASCII, after which nothing is cut
SEPARATOR, LETTER, SPACE, DIGIT, OTHER, BLANK, NEWLINE, APOSTROPHE, UNSURE = range(9)
WHITE, BLACK = {SPACE, BLANK, NEWLINE}, {LETTER, DIGIT, OTHER, APOSTROPHE}

@functools.cache
def class_tables():
    """The classes of all code points as uint8, and of all bytes for bytes.translate; 0xff, which UTF-8 never has, separates."""
    text = np.arange(0x110000, dtype='<u4').tobytes().decode('utf-32-le', 'surrogatepass')
    table = np.full(0x110000, OTHER, np.uint8)
    for kind, members in (LETTER, r'\p{L}+'), (DIGIT, r'\p{N}+'), (UNSURE, r'\s+'):
        for m in regex.finditer(members, text):
            table[m.start():m.end()] = kind
    table[:128][table[:128] == UNSURE] = BLANK
    table[[*b" \n\r'"]] = SPACE, NEWLINE, NEWLINE, APOSTROPHE
    return table, table[:128].tobytes() + bytes([SEPARATOR]) * 128

def gpt2_cut(a, b):
    """May GPT-2's pattern be cut between neighbours of classes a and b (1), before a (2), both (3), or neither (0)?"""
    if a in WHITE and b in BLACK:
        return 2 + (a != SPACE)             # the last white space goes with the word if it is a space, else it is alone
    return int(a != b and a not in (SPACE, UNSURE) and not {a, b} <= WHITE | {UNSURE}
               and (a, b) not in ((APOSTROPHE, LETTER), (APOSTROPHE, OTHER), (OTHER, APOSTROPHE)))

def gpt4_cut(a, b):
    """As gpt2_cut, for GPT-4's pattern, where line breaks go with what stands before them."""
    if a in (LETTER, DIGIT):
        return int(a != b)
    if a in (OTHER, APOSTROPHE):
        return int(b in (DIGIT, SPACE, BLANK, UNSURE))
    return (b in BLACK) * {SPACE: 2, NEWLINE: 1}.get(a, 0)

# for bytes.translate: 16 a + b -> what the rule says about neighbours of classes a and b
CUTS = {name: bytes(0 if max(a, b) > UNSURE else 1 if SEPARATOR in (a, b) else rule(a, b) for a in range(16) for b in range(16))
        for name, rule in (('gpt2', gpt2_cut), ('gpt4', gpt4_cut))}
ONE_WORD = {'gpt2': NEWLINE, 'gpt4': SPACE}     # a piece of classes up to this one is a single word

def classes(raw):
    """UTF-8 bytes -> the class of each byte, which is that of its character."""
    of_char, of_byte = class_tables()
    kinds = np.frombuffer(raw.translate(of_byte), np.uint8)
    if not raw.isascii():
        kinds, view = kinds.copy(), np.frombuffer(raw, np.uint8)
        at = np.flatnonzero((view >= 128) & (view < 255))
        code = np.frombuffer(view[at].tobytes().decode().encode('utf-32-le'), '<u4')
        kinds[at] = np.repeat(of_char[code], 2 + (code > 0x7FF) + (code > 0xFFFF))
    return kinds

def cuts(raw, pattern):
    """Where the pieces of UTF-8 bytes begin: two table look-ups a byte."""
    kinds = classes(raw)
    says = np.frombuffer((kinds[:-1] << 4 | kinds[1:]).tobytes().translate(CUTS[pattern]), np.uint8)
    begins = np.ones(len(raw), np.uint8)
    begins[1:] = says & 1
    begins[1:-1] |= says[1:] >> 1
    return np.flatnonzero(begins.view(bool))

def words_of(pieces, pattern):
    """[bytes] -> (the words in them, for each word the index of its piece)"""
    size = np.fromiter(map(len, pieces), int) + 1
    worst = np.maximum.reduceat(classes(b'\xff'.join([*pieces, b''])), np.cumsum(size) - size)
    words, count, after, findall = [], np.ones(len(pieces), int), 0, regex.compile(PATTERNS[pattern]).findall
    for i in np.flatnonzero(worst > ONE_WORD[pattern]).tolist():
        found = findall(pieces[i].decode())
        words += pieces[after:i] + [w.encode() for w in found]
        count[i], after = len(found), i + 1
    return words + pieces[after:], np.repeat(np.arange(len(pieces)), count)

# -----------------------------------------------------------------------------
# numbering pieces: a hash table in numpy, where every step is taken for all keys at once

WINDOW = 1 << 17        # bytes that are worked on at once: they stay in the processor's cache
# by the size of a piece: which of its first 8 bytes are not its own, and which of the next 8
PAD_LO, PAD_HI = np.frombuffer(b''.join([bytes(n) + b'\xff' * (16 - n) for n in range(16)]), '<u8').reshape(-1, 2).T.copy()

class Index:
    """Numbers distinct pairs of uint64 from 1: linear probing, a quarter full. 6 ns a key, where a dict of bytes takes 100."""
    def __init__(self):
        self.size, self.slots = 1, np.zeros(1 << 10, np.int32)      # number 0 says: not there
        self.lo, self.hi = np.zeros((2, 1 << 8), np.uint64)         # the keys by number
        self.lo[0] = 2 ** 64 - 1                                    # with hi = 0 that is no key

    def hash(self, lo, hi):
        h = (hi * np.uint64(0xC2B2AE3D27D4EB4F) ^ lo) * np.uint64(0x9E3779B97F4A7C15)
        return h, (h >> np.uint64(65 - len(self.slots).bit_length())).view(np.int64)

    def find(self, lo, hi):
        """-> the number of each key, 0 where it is not there"""
        slot = self.hash(lo, hi)[1]
        number = self.slots.take(slot)
        other = np.flatnonzero((self.lo.take(number) != lo) | (self.hi.take(number) != hi))
        while len(other := other[number[other] != 0]):      # the slot holds another key: try the next one
            slot[other] = (slot[other] + 1) % len(self.slots)
            number[other] = n = self.slots[slot[other]]
            other = other[(self.lo[n] != lo[other]) | (self.hi[n] != hi[other])]
        return number

    def add(self, lo, hi):
        """Numbers keys that are new and distinct."""
        first, self.size = self.size, self.size + len(lo)
        if grow := 4 * self.size > len(self.slots):         # place all of them again
            self.slots = np.zeros(1 << (4 * self.size).bit_length(), np.int32)
            self.lo, self.hi = (np.append(x, np.zeros(len(self.slots) // 4 - len(x), np.uint64)) for x in (self.lo, self.hi))
        self.lo[first:self.size], self.hi[first:self.size] = lo, hi
        number = np.arange(1 if grow else first, self.size, dtype=np.int32)
        slot = self.hash(self.lo[number], self.hi[number])[1]
        while len(number):
            free = self.slots[slot] == 0
            self.slots[slot[free][::-1]] = number[free][::-1]       # of two that want it the lower number gets it,
            left = self.slots[slot] != number                       # which came first and will come more often
            number, slot = number[left], (slot[left] + 1) % len(self.slots)

    def numbers(self, lo, hi):
        """-> (the number of each key, where those stand that are new); new keys get the next numbers, in order"""
        number, added = self.find(lo, hi), []
        while len(new := np.flatnonzero(number == 0)):
            _, first = np.unique(self.hash(lo[new], hi[new])[0], return_index=True)     # of equal hashes one at a time
            first = new[np.sort(first)]
            self.add(lo[first], hi[first])
            number[new] = self.find(lo[new], hi[new])
            added += first.tolist()
        return number, added

class Pieces:
    """Numbers the distinct pieces of texts, from 1 for the separator."""
    def __init__(self, pattern):
        self.pattern, self.index, self.long, self.all = pattern, Index(), {}, [b'']
        self.numbers(b'\xff', np.zeros(1, int))

    def windows(self, raw):
        """Yields the numbers of the pieces of UTF-8 bytes, an array for about every WINDOW bytes."""
        at, width = 0, WINDOW
        while at < len(raw):
            end = at + width
            while end < len(raw) and raw[end] & 0xC0 == 0x80:      # not inside a character
                end += 1
            window = raw[at:end]
            begin = cuts(window, self.pattern)
            if end < len(raw):                          # the last piece may go on: leave it to the next window
                window, begin, width = window[:begin[-1]], begin[:-1], width * 2
            if len(begin):
                yield self.numbers(window, begin)
                at, width = at + len(window), WINDOW

    def numbers(self, window, begin):
        """The numbers of the pieces that begin at the given places. The key of up to 15 bytes is these, filled up with 0xff."""
        end = np.append(begin[1:], len(window))
        size, padded = end - begin, window + bytes(16)
        lo, hi = np.ndarray(len(window), 'V16', padded, 0, (1,))[begin].view('<u8').reshape(-1, 2).T   # 16 bytes from there
        lo, hi = lo | PAD_LO.take(size, mode='clip'), hi | PAD_HI.take(size, mode='clip')

        def pieces(at):
            return [window[i:j] for i, j in zip(begin[at].tolist(), end[at].tolist())]
        long = size > 15
        if long.any():      # their key is their place in a dict
            lo[long], hi[long] = [self.long.setdefault(piece, len(self.long)) for piece in pieces(long)], 0
        number, new = self.index.numbers(lo, hi)
        self.all += pieces(new) if new else []
        return number

# -----------------------------------------------------------------------------
# training: count distinct words once, then merge in them, several pairs at a time

class count_words:
    """A picklable function: UTF-8 bytes -> (this process, pieces it has not met before, counts of all since its start)."""
    def __init__(self, pattern, special_tokens=()):
        self.pieces, self.special = Pieces(pattern), special_pattern(special_tokens, bytes)
        self.counts = np.zeros(0, np.int64)

    def __call__(self, raw):
        raw = b'\xff'.join(self.special.split(raw)[::2]) if self.special else raw
        numbers = np.concatenate([np.zeros(0, int), *self.pieces.windows(raw)])
        known, self.counts = self.counts, np.bincount(numbers, minlength=len(self.pieces.all))
        self.counts[:len(known)] += known
        return os.getpid(), self.pieces.all[len(known):], self.counts

def add_up(keys, counts):
    """-> {key: sum of its counts}"""
    first, total = {}, np.zeros(len(counts), np.int64)      # where a key stands for the first time
    np.add.at(total, np.fromiter(map(first.setdefault, keys, count()), int, len(counts)), counts)
    return dict(zip(first, total[np.fromiter(first.values(), int)].tolist()))

def add_counts(counted, pattern):
    """Adds up what count_words gave for the blocks of a text, in one process or several. -> {word as bytes: count}"""
    pieces, counts = {0: [b'', b'\xff']}, {0: np.zeros(2, int)}
    for process, new, counts[process] in counted:
        pieces.setdefault(process, []).extend(new)
    total = add_up(chain(*pieces.values()), np.concatenate([*counts.values()]))
    del total[b''], total[b'\xff']
    words, owner = words_of([*total], pattern)
    return add_up(words, np.array([*total.values()], np.int64)[owner])

def train_bpe(input_path, vocab_size, special_tokens=(), pattern='gpt2', workers=None):
    """
    Trains byte-level BPE on a text file (or a list of them). -> (vocab, merges)

    vocab: {id: bytes}: the 256 bytes, a token per merge, then the special tokens; fewer than vocab_size if the text has no
    more pairs. merges: [(bytes, bytes)] in order: the most frequent pair wins, ties go to the greater pair of bytes. No
    merge crosses a special token. The result does not depend on `workers` (processes; by default one per core). Memory is
    bounded by the distinct words. Raises UserError for a vocab_size below 256 + special tokens, or text that is not UTF-8.
    """
    def read():
        for path in [input_path] if isinstance(input_path, (str, os.PathLike)) else input_path:
            try:
                with open(path, 'rb') as f:
                    yield from read_blocks(f, path, special_tokens)
            except OSError as e:
                raise UserError(f'can not read {path}: {e.strerror}; check the path')
    special_tokens = [*dict.fromkeys(special_tokens or ())]
    check_vocab_size(vocab_size, special_tokens)
    counted = parallel_map(count_words(pattern, special_tokens), read(), workers or default_workers())
    return merge_words(add_counts(counted, pattern), vocab_size, special_tokens)

def check_vocab_size(vocab_size, special_tokens):
    if vocab_size < (least := 256 + len(special_tokens)):       # the bytes and these
        raise UserError(f'vocab_size {vocab_size} is too small: it counts bytes and special tokens, so give {least} or more')

def merge_words(counts, vocab_size, special_tokens=(), progress=lambda steps: steps):
    """{word as bytes: count} -> (vocab, merges), as train_bpe returns them; equal to plain_train."""
    state, merges = Merging(counts, vocab_size - len(special_tokens)), []
    while batch := state.next_batch():
        merges += [(a, b) for _, a, b, *_ in batch]
        progress(len(batch))
    return dict(enumerate(state.vocab + [token.encode() for token in special_tokens])), merges

def every_other(at, step):
    """Of sorted places those to merge at where pairs overlap, as in aaa: every_other([3, 4, 5, 9], 1) -> [3, 5, 9]"""
    index, alone = np.arange(len(at)), np.diff(at, prepend=-step) != step
    return at[(index - np.maximum.accumulate(index * alone)) % 2 == 0]

def groups(keys, weight):
    """-> (an order in which equal keys are neighbours, where each key begins in it, the weight of each key)"""
    order = np.argsort(keys, kind='stable' if keys.dtype == np.uint16 else None)
    begin = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)[:len(keys)])
    return order, begin, np.add.reduceat(weight[order], begin)

LOW = (1 << 32) - 1     # a pair of ids is one integer: a << 32 | b
TOP = 64                # pairs that are looked at for the next batch

class Merging:
    """
    The words in the middle of training. What comes out is what plain_train finds, but:
    - All words lie in one array, and a merge touches only the places where its pair stands.
    - The places of a pair are listed once, when the younger of its tokens is made. From then on its count can only
      fall, so an old count is an upper bound. It is brought up to date when the pair comes near the top.
    - Some twenty pairs are merged at once: the next ones in order of (count, bytes, bytes), as long as no first token
      of one is the second of another, so that none changes the count of another, and as long as no pair that one of
      them makes comes before the ones that follow it.
    An entry is (count, bytes, bytes, pair, size of the vocabulary when it was counted, the places where it stood then).
    """
    def __init__(self, counts, limit):
        self.vocab = [bytes([i]) for i in range(256)]
        self.end = min(limit, 256 + sum(map(len, counts)))      # tokens at most: the id of what stands around the words
        self.length = np.ones(self.end + 1, np.int32)           # bytes of each token
        self.as_first, self.as_second = np.zeros((2, self.end), int).tolist()       # vocabulary when it was last merged so
        # a token's id stands at its first byte in `first` and at its last byte in `last`
        size = np.array([*map(len, counts)], np.int64)
        self.first = np.frombuffer(b'\xff'.join([b'', *counts, b'']), np.uint8).astype(np.int32)
        self.first[np.append(0, np.cumsum(size + 1))] = self.end
        self.last = self.first.copy()
        self.weight = np.append(0, np.repeat(np.array([*counts.values()], np.int64), size + 1))
        self.pool, self.floor = [], 1 << 62     # sorted entries: all that count `floor` or more
        self.rest, self.places = [], []         # columns of the others: count, pair, which of the places, from, to
        self.born(np.arange(len(self.first) - 1, dtype=np.int32))

    def born(self, at):
        """Enters the pairs that begin at these places."""
        a = self.first[at]
        b = self.first[at + self.length[a]]
        keep = (a != self.end) & (b != self.end)
        at, a, b = at[keep], a[keep], b[keep]
        # pairs of bytes are sorted as 16 bits: five times as fast
        keys = (a << 8 | b).astype(np.uint16) if len(self.vocab) == 256 else a.astype(np.int64) << 32 | b
        order, begin, count = groups(keys, self.weight[at])
        self.enter(count, a[order[begin]].astype(np.int64) << 32 | b[order[begin]], at[order], begin)

    def enter(self, count, pairs, at, begin):
        """Enters pairs whose places lie end to end in `at`."""
        self.places.append((len(self.vocab), at.astype(np.int32)))
        which = np.full(len(pairs), len(self.places) - 1)
        self.choose(np.stack([count, pairs, which, begin, np.append(begin, len(at))[1:]]))

    def choose(self, columns):
        """Puts what counts enough in the pool."""
        ready = columns[0] >= self.floor
        self.rest.append(columns[:, ~ready])
        entries = [(n, self.vocab[pair >> 32], self.vocab[pair & LOW], pair, self.places[k][0], self.places[k][1][i:j])
                   for n, pair, k, i, j in columns[:, ready].T.tolist()]
        if len(entries) > TOP:
            self.pool = sorted(self.pool + entries)
        else:
            for entry in entries:
                bisect.insort(self.pool, entry)

    def gather(self, entries):
        """-> the places of these pairs, the index of the pair of each, where its second token begins and where it ends"""
        at, pairs = np.concatenate([e[5] for e in entries]).astype(np.int64), np.array([e[3] for e in entries])
        who = np.repeat(np.arange(len(pairs)), [len(e[5]) for e in entries])
        middle = at + self.length[pairs >> 32][who]
        return at, who, middle, middle + self.length[pairs & LOW][who], pairs

    def exact(self, entry):
        """Is its count up to date? Places are lost when its first token is merged as a second, or its second as a first."""
        first, second, counted = entry[3] >> 32, entry[3] & LOW, entry[4]
        return self.as_second[first] <= counted and self.as_first[second] <= counted

    def recount(self):
        """Fills the pool up, and brings the top of it up to date."""
        if len(self.pool) < TOP and self.rest:
            columns, self.rest = np.concatenate(self.rest, 1), []
            if n := min(len(self.vocab), columns.shape[1]):         # few at first, since most of what is born would follow
                self.floor = np.partition(columns[0], -n)[-n]
                self.choose(columns)
        top = self.pool[-TOP:]
        if old := [entry for entry in top if not self.exact(entry)]:
            self.pool[-TOP:] = filter(self.exact, top)
            at, who, middle, _, pairs = self.gather(old)
            there = (self.first[at].astype(np.int64) << 32 | self.first[middle]) == pairs[who]
            count = np.add.reduceat(self.weight[at] * there, np.searchsorted(who, np.arange(len(old))))
            begin, some = np.searchsorted(who[there], np.arange(len(old))), count > 0
            self.enter(count[some], pairs[some], at[there], begin[some])

    def next_batch(self):
        """Merges the next few pairs. -> their entries, in order; none at the end"""
        batch, room = [], self.end - len(self.vocab)
        while room and not batch and (self.pool or self.rest):
            self.recount()
            firsts, seconds = set(), set()
            for entry in reversed(self.pool):
                a, b = entry[3] >> 32, entry[3] & LOW
                if not self.exact(entry) or a in seconds or b in firsts or len(batch) == room:
                    break
                at = every_other(np.sort(entry[5]), len(entry[1])) if a == b else entry[5]
                batch.append((*entry[:5], at))
                firsts.add(a)
                seconds.add(b)
        return self.merge(batch) if batch else []

    def merge(self, batch):
        """Merges the pairs of the batch, up to the first that is overtaken, and returns them."""
        at, who, middle, end, _ = self.gather(batch)
        batch = batch[:self.overtaken(batch, at, who, end)]
        n, old = np.searchsorted(who, len(batch)), len(self.vocab)
        at, who, middle, end = at[:n], who[:n], middle[:n], end[:n]
        for _, x, y, pair, *_ in batch:
            self.length[len(self.vocab)] = len(x + y)
            self.vocab.append(x + y)        # no other pair spells this: its bytes were merged alike wherever they stand
            self.as_first[pair >> 32] = self.as_second[pair & LOW] = old + len(batch)
        del self.pool[-len(batch):]
        self.first[middle] = -1
        self.first[at] = self.last[end - 1] = old + who
        left = at - self.length[self.last[at - 1]]
        self.born(np.append(left[self.first[left] < old], at))      # not twice between two new tokens
        return batch

    def overtaken(self, batch, at, who, end):
        """-> how many pairs of the batch come before all the pairs that those before them make"""
        sides = np.append(who << 33 | self.last[at - 1], who << 33 | 1 << 32 | self.first[end])
        order, begin, count = groups(sides, np.tile(self.weight[at], 2))
        near, stop = np.flatnonzero(count >= batch[-1][0]), len(batch)
        for n, side in zip(count[near].tolist(), sides[order[begin[near]]].tolist()):
            i, token = side >> 33, side & LOW
            if token != self.end:
                made, other = batch[i][1] + batch[i][2], self.vocab[token]      # in aaaa, (aa, a) stands for (aa, aa):
                pair = (n, made, other) if side >> 32 & 1 else (n, other, made)     # none in the batch comes between
                stop = next((j for j in range(i + 1, stop) if batch[j][:3] < pair), stop)
        return stop

# -----------------------------------------------------------------------------
# encoding and decoding

LONG_TEXT = 3000        # characters: shorter texts are looked up in a dict, longer ones in arrays; here both take 80 us
STREAM = 1 << 16        # bytes of a stream that are encoded at once
LONG_WORD = 64          # bytes: longer words are merged one by one
BATCH = 1 << 14         # ids that are decoded at once
MAX_PIECES = 1 << 18    # distinct pieces whose ids are kept
NONE = np.uint32(2 ** 32 - 1)

# a text can be cut before a space, if what stands before or after it is not white space
SAFE_SPACE, UNSAFE_SPACE = re.compile(r' (?:(?=\S)|(?<=\S ))'), re.compile(r' (?!\S)(?<=\s )')

class Cache(dict):
    """A dict of limited size that asks a function for what it lacks."""
    def __init__(self, function):
        self.function = function

    def __missing__(self, key):
        if len(self) >= MAX_PIECES:
            self.clear()
        value = self.function(key)
        if len(key) < 64:           # longer ones hardly come again
            self[key] = value
        return value

class Ragged:
    """Short arrays, to be put end to end in any order. flat: all of them end to end; size: how many items each has."""
    def __init__(self, flat, size):
        self.flat, self.size, self.begin = flat, np.asarray(size), np.cumsum(size) - size

    def join(self, index):
        """-> (the arrays of these numbers end to end, where each one begins)"""
        size = self.size.take(index)
        begin = np.cumsum(size) - size
        return self.flat.take(np.repeat(self.begin.take(index) - begin, size) + np.arange(size.sum())), begin

class BaseTokenizer:
    """What all share: special tokens, streams, bytes. A subclass has `pattern`, which cuts text into words, and `word_ids`."""
    def set_vocab(self, vocab, special_tokens):
        self.vocab, self.special_ids = dict(vocab), {}
        self.id_of = {b: i for i, b in self.vocab.items()}
        for token in special_tokens or ():
            id = self.special_ids[token] = self.id_of.get(token.encode(), max(self.vocab, default=-1) + 1)
            self.id_of[token.encode()], self.vocab[id] = id, token.encode()
        self.vocab_size = max(self.vocab, default=-1) + 1
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.eot = self.special_ids.get(END_OF_TEXT)
        self.special = special_pattern(self.special_ids)
        self.cache = Cache(self.word_ids)
        self.caches = [self.cache]

    def encode(self, text):
        """text -> list of ids; special tokens in it become their own ids, the longest where several fit."""
        if len(text) > LONG_TEXT or self.special and self.special.search(text):
            return self.encode_to_numpy(text).tolist()
        return self.encode_ordinary(text)

    def encode_ordinary(self, text):
        """text -> list of ids; special tokens in it are text like any other."""
        return [*chain.from_iterable(map(self.cache.__getitem__, self.pattern.findall(text)))]

    def encode_to_numpy(self, text):
        """encode(text) as an array of uint16 (of uint32 for more than 65,536 tokens); the fastest for a long text."""
        parts = self.special.split(text) if self.special else [text]
        special = [self.special_ids[token] for token in parts[1::2]]
        return self.encode_bytes(b'\xff'.join([part.encode() for part in parts[::2]]), special)

    def encode_bytes(self, raw, special=()):
        """UTF-8 bytes -> array of ids; a byte 0xff becomes the next id of `special`, or that one if it is a number."""
        parts = [self.encode_ordinary(part.decode()) for part in raw.split(b'\xff')]
        special = np.broadcast_to(special, len(parts) - 1).tolist()
        return np.array([*parts[0], *chain.from_iterable([id, *part] for id, part in zip(special, parts[1:]))], self.dtype)

    def encode_iterable(self, chunks):
        """Yields the ids of encode(''.join(chunks)), wherever they were cut. Holds STREAM, or a text without a space."""
        for block in blocks((chunk.encode() for chunk in chunks), STREAM, self.special_ids):
            yield from self.encode(block.decode())
            self.forget(1 << 14)

    def forget(self, limit=0):
        """Drops what is kept of earlier texts to be faster, if that is more than `limit` words."""
        for cache in self.caches:
            if len(cache) > limit:
                cache.clear()

    @functools.cached_property
    def token_bytes(self):
        tokens = [self.vocab.get(i, b'') for i in range(self.vocab_size)]
        return Ragged(np.frombuffer(b''.join(tokens), np.uint8), [*map(len, tokens)])

    def decode_bytes(self, ids):
        """ids (a sequence; an array is fastest) -> bytes. Raises ValueError for what is no id of the vocabulary."""
        ids = ids if isinstance(ids, np.ndarray) else np.array(ids.tolist() if hasattr(ids, 'tolist') else [*ids])
        ids = ids if ids.size else np.zeros(0, int)
        if ids.ndim != 1 or ids.dtype.kind not in 'iu' or ids.size and not (
                0 <= ids.min() <= ids.max() < self.vocab_size and self.token_bytes.size[ids].all()):
            raise ValueError(f'not all of these are ids of the vocabulary of {len(self.vocab)} tokens: {ids}')
        return b''.join([self.token_bytes.join(ids[i:i + BATCH])[0].tobytes() for i in range(0, len(ids), BATCH)])

    def decode(self, ids):
        """ids -> text. Bytes that are no UTF-8 (a character cut in half) become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def save(self, path):
        """Writes tokenizer.json in the format of Hugging Face `tokenizers`."""
        pre_tokenizer, model, decoder = self.as_json()
        added = [{'id': i, 'content': t, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False,
                  'special': True} for t, i in sorted(self.special_ids.items(), key=lambda x: x[1])]
        data = {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'normalizer': None,
                'pre_tokenizer': pre_tokenizer, 'post_processor': None, 'decoder': decoder, 'model': model}
        with open(path, 'w', encoding='utf-8', newline='\n') as f:
            json.dump(data, f, ensure_ascii=False, indent=1)

class Tokenizer(BaseTokenizer):
    """Byte-level BPE: every text that UTF-8 can hold has ids, and decode(encode(text)) == text."""
    def __init__(self, vocab, merges, special_tokens=None, pattern='gpt2'):
        """vocab and merges as train_bpe returns them; special tokens that vocab lacks come last. pattern: 'gpt2' or 'gpt4'."""
        self.set_vocab(vocab, special_tokens)
        self.merges = [tuple(m) for m in merges]
        self.pattern_name, self.pattern = pattern, regex.compile(PATTERNS[pattern])
        try:
            self.byte_ids = [self.id_of[bytes([b])] for b in range(256)]
            self.ranks, made = {}, {*self.byte_ids}     # pair of ids -> (rank, id of the two together)
            for rank, (a, b) in enumerate(self.merges):
                pair, new = (self.id_of[a], self.id_of[b]), self.id_of[a + b]
                if not made.issuperset(pair) or pair in self.ranks:
                    raise UserError(f'merge {rank} joins {a} and {b} twice or too early; use the merges in their order')
                self.ranks[pair] = rank, new
                made.add(new)
        except KeyError as e:
            raise UserError(f'this vocabulary lacks {e}, a byte or what the merges make; use the files of one tokenizer')
        for token, id in self.special_ids.items():
            twin = from_printable(token) if {*token} <= TO_BYTE.keys() else b''     # in a file both would look alike
            if id in made or self.id_of.get(twin, id) != id:
                raise UserError(f'the special token {token!r} is an ordinary one too; take another')
        self.size = self.token_bytes.size.tolist()      # bytes of each token
        self.after_space, self.tables = Cache(self.ids_after_space), []
        self.caches.append(self.after_space)

    @classmethod
    def from_files(cls, vocab_path, merges_path, special_tokens=None, pattern='gpt2'):
        """Opens GPT-2's pair of files: vocab.json ({token: id}) and merges.txt (a pair a line)."""
        vocab = read_json(vocab_path)
        try:
            with open(merges_path, encoding='utf-8') as f:
                merges = [line for line in f.read().split('\n') if line and line[:9] != '#version:']
            specials = [END_OF_TEXT] if special_tokens is None and END_OF_TEXT in vocab else special_tokens
            return cls(*read_bpe(vocab, merges, specials or ()), specials, pattern)
        except (OSError, KeyError, ValueError, AttributeError, TypeError) as e:
            raise UserError(f'{vocab_path} and {merges_path} are no vocab and merges of one tokenizer ({e!r}); give such files')

    def encode_ordinary(self, text):
        """text -> list of ids; special tokens in it are text like any other."""
        if len(text) > LONG_TEXT:
            return self.encode_bytes(text.encode()).tolist()
        # cutting at spaces is twice as fast as the pattern, which only sees what is new
        first, *rest = SAFE_SPACE.split(text) if UNSAFE_SPACE.search(text) else text.split(' ')
        return [*super().encode_ordinary(first), *chain.from_iterable(map(self.after_space.__getitem__, rest))]

    def ids_after_space(self, piece):
        return super().encode_ordinary(' ' + piece)

    def word_ids(self, word):
        """The ids of one word: join the pair of lowest rank, the left one of several, until none has one. n log n by a heap."""
        ids, ranks, size = [*map(self.byte_ids.__getitem__, word.encode()), -1], self.ranks, self.size
        last = ids.copy()                   # a token's id stands at its first byte in `ids` and at its last in `last`
        heap = [(*ranks[p], i, *p) for i, p in enumerate(zip(ids, ids[1:])) if p in ranks]
        heapq.heapify(heap)
        while heap:
            _, new, i, a, b = heapq.heappop(heap)
            if ids[i] == a and ids[j := i + size[a]] == b:      # else one of the two was merged with its other neighbour
                end, left = j + size[b], last[i - 1]
                ids[i], ids[j], last[end - 1] = new, -1, new
                for at, p in (i, (new, ids[end])), (i - size[left], (left, new)):
                    if p in ranks:
                        heapq.heappush(heap, (*ranks[p], at, *p))
        return [x for x in ids if x >= 0]

    def forget(self, limit=0):
        super().forget(limit)
        # eight ids weigh as much as a piece
        if any(max(len(pieces.all), len(table.flat) >> 3) > limit for pieces, table in [*self.tables]):
            self.tables = []

    def encode_bytes(self, raw, special=()):
        """BaseTokenizer.encode_bytes, at 60 MB/s: a table takes the numbers of pieces to ids; new words are merged together."""
        try:            # taken while in use: another thread makes its own, and what an exception left half done is dropped
            pieces, table = self.tables.pop()
        except IndexError:
            pieces, table = Pieces(self.pattern_name), Ragged(np.zeros(1, self.dtype), [1])     # there is no piece 0
        windows, out, places, total = [*pieces.windows(raw)], [np.zeros(0, self.dtype)], [np.zeros(0, int)], 0
        if new := pieces.all[len(table.size):]:
            words, owner = words_of(new, self.pattern_name)
            ids, size = self.merge_words(words)
            table = Ragged(np.append(table.flat, ids), np.append(table.size, np.bincount(owner, size).astype(int)))
        for numbers in windows:
            ids, begin = table.join(numbers)
            out.append(ids)
            places.append(total + begin[numbers == 1])
            total += len(ids)
        ids = np.concatenate(out)
        ids[np.concatenate(places)] = special
        self.tables.append((pieces, table))
        self.forget(MAX_PIECES)
        return ids

    @functools.cached_property
    def pair_table(self):
        """(index of the pairs of ids, in the order of their ranks; the id each rank makes; the numbers of all pairs of bytes)"""
        index, ids = Index(), np.array(self.byte_ids, np.uint64)
        index.add(*np.array([*self.ranks], np.uint64).reshape(-1, 2).T)
        made = np.array([new for _, new in self.ranks.values()], np.int32)
        return index, made, index.find(np.repeat(ids, 256), np.tile(ids, 256))

    def merge_words(self, words):
        """word_ids for many words as bytes, in an eighth of the time. -> (their ids end to end, how many each has)"""
        def ranks(numbers):     # number 0, which is not there, becomes NONE
            return (numbers - np.int32(1)).view(np.uint32)
        index, made, of_bytes = self.pair_table
        size = np.array([*map(len, words)])
        who, long = np.flatnonzero(size <= LONG_WORD), np.flatnonzero(size > LONG_WORD).tolist()
        done = [([i], [len(ids)], ids) for i in long for ids in [self.word_ids(words[i].decode())]]
        raw = np.frombuffer(b''.join([words[i] for i in who.tolist()] if long else words), np.uint8)
        size, ids = size[who], np.array(self.byte_ids, np.int32)[raw]
        rank = np.append(ranks(of_bytes[raw[:-1].astype(int) << 8 | raw[1:]]), NONE)    # of the pair that begins here
        rank[np.cumsum(size) - 1] = NONE
        while len(who):         # every round merges in each word the pair of lowest rank; words that are done leave
            best = np.minimum.reduceat(rank, np.cumsum(size) - size)
            stay = best < NONE
            inside = np.repeat(stay, size)
            done.append((who[~stay], size[~stay], ids[~inside]))
            who, size, best, ids, rank = who[stay], size[stay], best[stay], ids[inside], rank[inside]
            at = every_other(np.flatnonzero(rank == np.repeat(best, size)), 1)
            ids[at], rank[at] = made[rank[at]], rank[at + 1]
            size -= np.bincount(np.searchsorted(np.cumsum(size), at, 'right'), minlength=len(size))
            keep = np.ones(len(ids), bool)
            keep[at + 1] = False
            ids, rank, at = ids[keep], rank[keep], at - np.arange(len(at))
            begins = np.zeros(len(ids) + 1, bool)
            begins[np.cumsum(size)] = begins[0] = True
            for i in at[~begins[at + 1]], at[~begins[at]] - 1:      # pairs whose first token is new, whose second is
                rank[i] = ranks(index.find(ids[i].astype(np.uint64), ids[i + 1].astype(np.uint64)))
        who, size, ids = (np.concatenate(x) for x in zip(*done))
        order = np.argsort(who)
        return Ragged(ids.astype(self.dtype), size).join(order)[0], size[order]

    def as_json(self):
        split = {'type': 'Split', 'pattern': {'Regex': PATTERNS[self.pattern_name]}, 'behavior': 'Isolated', 'invert': False}
        level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': self.pattern_name == 'gpt2'}
        pre = level if level['use_regex'] else {'type': 'Sequence', 'pretokenizers': [split, level]}
        specials = set(self.special_ids.values())
        vocab = {b.decode() if i in specials else printable(b): i for i, b in sorted(self.vocab.items())}
        merges = [[printable(a), printable(b)] for a, b in self.merges]
        return pre, {'type': 'BPE', 'vocab': vocab, 'merges': merges}, level

def ByteTokenizer(special_tokens=(END_OF_TEXT,)):
    """The 256 bytes and no merges."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)

class WordTokenizer(BaseTokenizer):
    """A token for each of the given words (matches of \\w+|.), <unk> for all others; that and the special tokens come last."""
    pattern_text = r'(?s)\w+|.'
    json_pattern = r'[\w\u200c\u200d&&[^²³¹¼-¾]]+|[\s\S]'     # the same in the regex of `tokenizers`

    def __init__(self, words, special_tokens=(END_OF_TEXT,)):
        special_tokens = [UNKNOWN, *(special_tokens or ())]
        words = [w.encode() for w in dict.fromkeys(words) if w not in special_tokens]
        self.pattern = regex.compile(self.pattern_text)
        self.set_vocab(enumerate(words), special_tokens)
        self.unknown = self.special_ids.pop(UNKNOWN)
        self.special = special_pattern(self.special_ids)       # a text can not ask for <unk> by name

    def word_ids(self, word):
        return [self.id_of.get(word.encode(), self.unknown)]

    def as_json(self):
        pre = {'type': 'Split', 'pattern': {'Regex': self.json_pattern}, 'behavior': 'Removed', 'invert': True}
        model = {'type': 'WordLevel', 'vocab': {b.decode(): i for i, b in self.vocab.items()}, 'unk_token': UNKNOWN}
        return pre, model, {'type': 'Fuse'}

class CharTokenizer(WordTokenizer):
    """A token for each of the given characters, <unk> for every other one."""
    pattern_text, json_pattern = r'(?s).', r'[\s\S]'

# -----------------------------------------------------------------------------
# tokenizer.json, the file format of Hugging Face `tokenizers`

# GPT-2's table: each byte as a character that prints, so that a token can be a key in JSON
PRINTABLE = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
TO_CHAR = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*PRINTABLE}))}
TO_BYTE = {c: b for b, c in TO_CHAR.items()}

def printable(token):
    return token.decode('latin-1').translate(TO_CHAR)

def from_printable(token):
    return bytes([TO_BYTE[c] for c in token])

def read_bpe(vocab, merges, specials):
    """The vocab and merges of a Tokenizer from those of a file: {token: id}, ['a b' or ['a', 'b']]"""
    by_id = {i: t.encode() if t in specials else from_printable(t) for t, i in vocab.items()}
    merges = [tuple(map(from_printable, m.split(' ') if isinstance(m, str) else m)) for m in merges]
    if len(by_id) < len(vocab) or {*map(len, merges)} - {2} or any(type(i) is not int or not 0 <= i < len(by_id) for i in by_id):
        raise ValueError('a merge is no pair, or the ids are not 0, 1, 2, ..., each given once')
    return by_id, merges

def load_tokenizer(path):
    """Opens a tokenizer.json of ours, or of Hugging Face if it is byte-level BPE, with the ids it has. Raises UserError."""
    data = read_json(path)
    try:
        model, pre = data['model'], data['pre_tokenizer']
        specials = {t['content']: t['id'] for t in data['added_tokens']}
        for part, known in ((data, 'version added_tokens pre_tokenizer decoder model post_processor'),
                            (data.get('post_processor') or {}, 'type add_prefix_space trim_offsets use_regex'),
                            (model, 'type vocab merges unk_token fuse_unk'),
                            *((token, 'id content normalized special') for token in data['added_tokens'])):
            if asked := [key for key, value in part.items() if value and key not in known.split()]:
                raise ValueError(f'it asks for {asked[0]}, which is not known here')
        if model.get('type', 'BPE') not in ('BPE', 'WordLevel') or len({t.get('normalized') for t in data['added_tokens']}) > 1:
            raise ValueError('its type, or special tokens of two kinds, are not known here')
        if model.get('type') == 'WordLevel':
            kind = CharTokenizer if pre['pattern']['Regex'] == CharTokenizer.json_pattern else WordTokenizer
            tok = kind(sorted(model['vocab'], key=model['vocab'].get), [*specials])
            if tok.as_json()[:2] != (pre, model):
                raise ValueError('its words are not as prepare.py makes them')
        else:
            tok = Tokenizer(*read_bpe(specials | model['vocab'], model['merges'], specials), [*specials], find_pattern(pre))
        new = [i for t, i in specials.items() if t not in model['vocab']]       # these are numbered in the order of the file
        if specials != tok.special_ids or new != [*range(len(model['vocab']), len(model['vocab']) + len(new))]:
            raise ValueError('the id of a special token is not the one that others would give it')
        if not tok.token_bytes.size.all():
            raise ValueError('a token is empty')
        return tok
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UserError) as e:
        raise UserError(f'{path} is no tokenizer this project can use ({type(e).__name__}: {e}); byte-level BPE with the '
                        f'pattern of GPT-2 or GPT-4 works, as do those that prepare.py makes')

def find_pattern(pre):
    """The name of our pattern that a pre_tokenizer of a tokenizer.json stands for."""
    *split, level = pre.get('pretokenizers', [pre])
    if level['type'] == 'ByteLevel' and not level['add_prefix_space'] and level.get('use_regex', True) == (not split):
        if not split:
            return 'gpt2'
        if len(split) == 1 and (split[0]['behavior'], split[0]['invert']) in (('Isolated', False), ('Removed', True)):
            return {text: name for name, text in PATTERNS.items()}[split[0]['pattern']['Regex']]
    raise ValueError('its pre_tokenizer is not known here')

Tokenizer.load = staticmethod(load_tokenizer)
