"""
Byte-pair encoding, from the plainest form to the one that is used, and three simpler tokenizers beside it.

    vocab, merges = train_bpe('input.txt', vocab_size=1000, special_tokens=['<|endoftext|>'])
    tok = Tokenizer(vocab, merges, ['<|endoftext|>'])
    tok.encode('hello world')          # [259, 400, ...]
    tok.decode(tok.encode('héllo'))    # 'héllo'
    tok.save('tokenizer.json')         # Hugging Face `tokenizers` and `transformers` open it as it is

Text is cut into words by a pattern, and a word is a sequence of bytes. Training merges the most frequent pair of
neighbours into a new token, again and again (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2).
Encoding applies the same merges, earliest first. Everything below the first section is about doing that faster.
"""
import codecs
import heapq
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, defaultdict, deque
from concurrent.futures import ProcessPoolExecutor

import regex

from configurator import UserError, read_json

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
# reading text in pieces, and working on them in parallel

PIECE = 1 << 20     # characters that one process takes at a time
SMALL = 4           # as many pieces do not pay for processes
# a fork shares what is already imported; where it is missing (Windows) or unsafe (macOS) a new Python starts
START_METHOD = 'fork' if sys.platform == 'linux' else 'spawn'

# where a text may be cut without changing its tokens under any of our patterns: after a letter or digit, before what
# is neither. (?r) searches from the right.
SAFE_CUT = regex.compile(r'(?r)(?<=[\p{L}\p{N}])(?=[^\w\p{N}])')


def special_pattern(special_tokens):
    """Matches any special token, the longest where several fit; None if there are none."""
    tokens = sorted(filter(None, special_tokens or []), key=len, reverse=True)
    return regex.compile('|'.join(map(regex.escape, tokens))) if tokens else None


def read_pieces(file, name, special_tokens=()):
    """
    Reads a binary file as strings of about PIECE characters, cut where no token can cross: at the start of a special
    token if there is one in the piece, else at a SAFE_CUT. Joined, they are the text of the file, byte for byte.
    Raises UserError where the bytes are not UTF-8.
    """
    special = special_pattern(special_tokens)
    longest = max(map(len, special_tokens), default=1)
    decoder, text, offset, wanted = codecs.getincrementaldecoder('utf-8')(), '', 0, PIECE
    while True:
        chunk = file.read(PIECE)
        try:
            text += decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as e:
            at = offset - (len(e.object) - len(chunk)) + e.start    # a character may begin in the chunk before
            raise UserError(f'{name} is not UTF-8: byte {at} is {e.object[e.start]:#04x} ({e.reason}); convert the file '
                            f'first, for example with iconv -t utf-8')
        if not chunk:
            break
        offset += len(chunk)
        if len(text) < wanted:
            continue
        cut, after, sight = 0, 0, max(0, len(text) - longest)       # a special token that starts by then is in sight
        for m in special.finditer(text) if special else ():
            if m.start() > sight:
                break
            cut, after = m.start(), m.end()
        if not cut and (m := SAFE_CUT.search(text, after, sight)):
            cut = m.start()
        if cut:
            yield text[:cut]
        text, wanted = text[cut:], max(PIECE, 2 * (len(text) - cut))
    if text:
        yield text


def parallel_map(function, items, workers):
    """
    map(function, items) in order, in other processes, with at most a few items under way, so that a long input is
    never in memory as a whole. The first SMALL items are done here: a small job does not pay for processes.
    """
    items = iter(items)
    for _, item in zip(range(SMALL) if workers > 1 else iter(int, 1), items):
        yield function(item)
    first = next(items, None)
    if first is None:
        return
    with ProcessPoolExecutor(min(workers, 61), multiprocessing.get_context(START_METHOD), initializer=set_work, initargs=(function,)) as pool:
        waiting = deque([pool.submit(work, first)])
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def set_work(function):
    """Runs once in each new process: the function (which may hold a whole tokenizer) travels once, not per item."""
    global work_function
    work_function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C is the parent's to handle
    # a worker does not end by itself when its parent is killed
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def work(item):
    return work_function(item)


def default_workers():
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1

# -----------------------------------------------------------------------------
# training: count distinct words once, then keep the counts of pairs up to date

class count_words:
    """A picklable function: text -> Counter of the words in it, never across a special token."""

    def __init__(self, pattern, special_tokens=()):
        self.pattern, self.special_tokens = pattern, list(special_tokens)

    def __call__(self, text):
        special = special_pattern(self.special_tokens)
        counts = Counter()
        for part in special.split(text) if special else [text]:
            counts.update(regex.findall(self.pattern, part))
        return counts


def train_bpe(input_path, vocab_size, special_tokens=(), pattern='gpt2', workers=None):
    """
    Trains byte-level BPE on a text file (or a list of them) and returns (vocab, merges).

    vocab: {id: bytes}: the 256 bytes, one token per merge, then the special tokens; merges: [(bytes, bytes)] in order.
    The most frequent pair wins, ties go to the lexicographically greater pair of bytes. Special tokens in the text
    separate: no merge crosses one. The result does not depend on `workers` (processes; by default one per core).
    Memory is bounded by the number of distinct words. vocab holds fewer than vocab_size tokens if the text has no
    more pairs to merge. Raises UserError for a vocab_size below 256 + special tokens, or text that is not UTF-8.
    """
    special_tokens = list(special_tokens or [])
    paths = [input_path] if isinstance(input_path, (str, os.PathLike)) else input_path

    def pieces():
        for path in paths:
            try:
                with open(path, 'rb') as f:
                    yield from read_pieces(f, path, special_tokens)
            except OSError as e:
                raise UserError(f'can not read {path}: {e.strerror}; check the path')
    check_vocab_size(vocab_size, special_tokens)
    counts = Counter()
    for c in parallel_map(count_words(PATTERNS[pattern], special_tokens), pieces(), workers or default_workers()):
        counts.update(c)
    return merge_words(counts, vocab_size, special_tokens)


def check_vocab_size(vocab_size, special_tokens):
    least = 256 + len(special_tokens)
    if vocab_size < least:
        raise UserError(f'vocab_size {vocab_size} is too small: it counts the 256 bytes and {len(special_tokens)} '
                        f'special tokens, so give {least} or more')


def merge_words(counts, vocab_size, special_tokens=(), progress=lambda step: step):
    """
    {word: count} -> (vocab, merges), as train_bpe returns them. Equal to plain_train, but a merge only touches the
    words that hold the pair, and the best pair comes from a heap. Entries of the heap are never updated: one whose
    count is out of date is dropped when it comes up.
    """
    vocab = {i: bytes([i]) for i in range(256)}
    id_of = {b: i for i, b in vocab.items()}
    words = [list(w.encode()) for w in counts]
    freq = list(counts.values())
    pair_counts, words_with = Counter(), defaultdict(set)
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pair_counts[pair] += freq[i]
            words_with[pair].add(i)

    # heapq gives the smallest: with every byte turned round and an end mark above all, that is the greatest bytes
    turned = [chr(255 - i) + '\u0100' for i in range(256)]
    heap = [(-n, turned[a], turned[b], a, b) for (a, b), n in pair_counts.items()]
    heapq.heapify(heap)
    merges = []
    while heap and len(vocab) < vocab_size - len(special_tokens):
        n, _, _, a, b = heapq.heappop(heap)
        if pair_counts.get((a, b)) != -n:
            continue
        joined = vocab[a] + vocab[b]
        new = id_of.setdefault(joined, len(vocab))     # two different merges can spell the same token
        if new == len(vocab):
            vocab[new] = joined
            turned.append(turned[a][:-1] + turned[b])
            progress(1)
        merges.append((vocab[a], vocab[b]))
        changed = set()
        for i in words_with.pop((a, b)):
            word = words[i]
            for pair in zip(word, word[1:]):
                pair_counts[pair] -= freq[i]
            changed.update(zip(word, word[1:]))
            j = 0
            while j < len(word) - 1:
                if word[j] == a and word[j + 1] == b:
                    word[j:j + 2] = [new]
                j += 1
            for pair in zip(word, word[1:]):
                pair_counts[pair] += freq[i]
                words_with[pair].add(i)
                changed.add(pair)
        for pair in changed:
            if pair_counts[pair] > 0:
                x, y = pair
                heapq.heappush(heap, (-pair_counts[pair], turned[x], turned[y], x, y))
            else:
                del pair_counts[pair]
                words_with.pop(pair, None)
    for token in special_tokens:
        vocab[len(vocab)] = token.encode()
    return vocab, merges

# -----------------------------------------------------------------------------
# encoding and decoding

class BaseTokenizer:
    """
    What all tokenizers share: special tokens, streams and bytes. A subclass sets `pattern` (compiled; cuts a text into
    words), `vocab` ({id: bytes}) and `word_ids(word) -> ids`, the ids of one match of the pattern.
    """
    pattern = vocab = None

    def set_vocab(self, vocab, special_tokens):
        self.vocab = dict(vocab)
        self.id_of = {b: i for i, b in self.vocab.items()}
        self.special_ids = {}
        for token in special_tokens or []:
            if not token:
                raise UserError('a special token can not be empty; remove it')
            id = self.id_of.setdefault(token.encode(), max(self.vocab, default=-1) + 1)
            self.vocab[id] = token.encode()
            self.special_ids[token] = id
        self.vocab_size = max(self.vocab) + 1
        self.eot = self.special_ids.get(END_OF_TEXT)
        self.special = special_pattern(self.special_ids)
        self.longest_special = max(map(len, self.special_ids), default=0)
        self.cache = {}

    def encode(self, text):
        """text -> list of ids; special tokens in it become their own ids, the longest where several fit."""
        ids, start = [], 0
        for m in self.special.finditer(text) if self.special else ():
            ids += self.encode_ordinary(text[start:m.start()])
            ids.append(self.special_ids[m[0]])
            start = m.end()
        return ids + self.encode_ordinary(text[start:])

    def encode_ordinary(self, text):
        """text -> list of ids; special tokens in it are text like any other."""
        return self.encode_words(self.pattern.findall(text))

    def encode_words(self, words):
        ids, cache = [], self.cache
        for word in words:
            got = cache.get(word)
            if got is None:
                got = self.word_ids(word)
                if len(cache) < 1 << 18 and len(word) < 64:    # bounded, and long words hardly come again
                    cache[word] = got
            ids += got
        return ids

    def encode_iterable(self, chunks):
        """Yields the ids of encode(''.join(chunks)), wherever the chunks were cut, and holds only what is undecided."""
        text, size, wanted = [], 0, 1 << 14
        for chunk in chunks:
            text.append(chunk)
            size += len(chunk)
            if size >= wanted:
                joined = ''.join(text)
                ids, done = self.encode_decided(joined)
                yield from ids
                text, size = [joined[done:]], len(joined) - done
                wanted = 2 * size + (1 << 14)      # a long undecided word is not looked at for every chunk
        yield from self.encode(''.join(text))

    def encode_decided(self, text):
        """-> (ids, end): the ids of text[:end], which no continuation of the text can change."""
        ids, start = [], 0
        sight = len(text) - self.longest_special   # a special token that starts here or before is in sight
        for m in self.special.finditer(text) if self.special else ():
            if m.start() > sight:
                break
            ids += self.encode_ordinary(text[start:m.start()]) + [self.special_ids[m[0]]]
            start = m.end()
        # of the rest: words that end before trailing white space (it belongs to what follows) and before the last
        # three characters (as many as a contraction looks ahead)
        end, words = len(text[:max(sight, start)].rstrip()) - 3, []
        for m in self.pattern.finditer(text, start):
            if m.end() > end:
                break
            words.append(m[0])
            start = m.end()
        return ids + self.encode_words(words), start

    def decode_bytes(self, ids):
        """ids -> bytes. Raises ValueError for an id outside the vocabulary."""
        try:
            return b''.join([self.vocab[int(i)] for i in ids])
        except KeyError as e:
            raise ValueError(f'id {e} is not in the vocabulary of {len(self.vocab)} tokens')

    def decode(self, ids):
        """ids -> text. Bytes that are no UTF-8 (a character cut in half) become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def save(self, path):
        """Writes tokenizer.json in the format of Hugging Face `tokenizers`."""
        with open(path, 'w', encoding='utf-8', newline='\n') as f:
            json.dump(self.as_json(), f, ensure_ascii=False, indent=1)


class Tokenizer(BaseTokenizer):
    """Byte-level BPE: every text has ids, and decode(encode(text)) == text."""

    def __init__(self, vocab, merges, special_tokens=None, pattern='gpt2'):
        """
        vocab: {id: bytes}, merges: [(bytes, bytes)] in order, as train_bpe returns them. Special tokens that vocab
        does not hold are added at its end. pattern: 'gpt2' or 'gpt4', how text is cut into words.
        """
        self.set_vocab(vocab, special_tokens)
        self.merges = [tuple(m) for m in merges]
        self.pattern_name, self.pattern = pattern, regex.compile(PATTERNS[pattern])
        missing = [b for b in range(256) if bytes([b]) not in self.id_of]
        if missing:
            raise UserError(f'this vocabulary lacks byte {missing[0]}: it is not a byte-level BPE; use another file')
        try:
            # pair of ids -> (rank, id of the two together)
            self.ranks = {}
            for rank, (a, b) in enumerate(self.merges):
                self.ranks.setdefault((self.id_of[a], self.id_of[b]), (rank, self.id_of[a + b]))
        except KeyError as e:
            raise UserError(f'the merges name {e}, which the vocabulary lacks; use the files of one tokenizer')

    @classmethod
    def from_files(cls, vocab_path, merges_path, special_tokens=None, pattern='gpt2'):
        """Opens GPT-2's pair of files: vocab.json ({token: id}) and merges.txt (a pair a line)."""
        vocab = read_json(vocab_path)
        try:
            with open(merges_path, encoding='utf-8') as f:
                lines = f.read().split('\n')
            merges = [tuple(map(from_printable, line.split(' '))) for line in lines if line and line[:9] != '#version:']
            specials = [END_OF_TEXT] if special_tokens is None and END_OF_TEXT in vocab else special_tokens
            vocab = {i: t.encode() if t in (specials or ()) else from_printable(t) for t, i in vocab.items()}
            return cls(vocab, merges, specials, pattern)
        except (OSError, UnicodeDecodeError, KeyError, ValueError, AttributeError, TypeError) as e:
            raise UserError(f'can not read {vocab_path} with {merges_path} as a vocabulary and its merges: {e!r}; '
                            f'give the vocab.json and merges.txt of one tokenizer')

    def word_ids(self, word):
        """The ids of one word: join the pair of lowest rank, from the left, until no pair has one."""
        ids = [self.id_of[bytes([b])] for b in word.encode()]
        ranks = self.ranks
        if len(ids) > 50:
            return merge_long(ids, ranks)
        while len(ids) > 1:
            best = min((ranks[p] for p in zip(ids, ids[1:]) if p in ranks), default=None)
            if best is None:
                break
            i = 0
            while i < len(ids) - 1:
                if ranks.get((ids[i], ids[i + 1])) == best:
                    ids[i:i + 2] = [best[1]]
                i += 1
        return ids

    def as_json(self):
        if self.pattern_name == 'gpt2':        # the pattern that ByteLevel has built in
            pre = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
        else:
            split = {'type': 'Split', 'pattern': {'Regex': PATTERNS[self.pattern_name]}, 'behavior': 'Isolated',
                     'invert': False}
            level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
            pre = {'type': 'Sequence', 'pretokenizers': [split, level]}
        specials = set(self.special_ids.values())
        model = {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                 'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
                 'vocab': {b.decode() if i in specials else printable(b): i for i, b in sorted(self.vocab.items())},
                 'merges': [[printable(a), printable(b)] for a, b in self.merges]}
        decoder = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': True}
        return tokenizer_json(self, pre, model, decoder)


def ByteTokenizer(special_tokens=(END_OF_TEXT,)):
    """The 256 bytes and no merges."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)


def merge_long(ids, ranks):
    """
    What the loop in Tokenizer.word_ids does, for words where its square of the length would hurt: a heap of pairs
    (rank, position) over a linked list. n log n instead of n^2.
    """
    n = len(ids)
    after, before = list(range(1, n + 1)), list(range(-1, n - 1))
    heap = [(*ranks[p], i, *p) for i, p in enumerate(zip(ids, ids[1:])) if p in ranks]
    heapq.heapify(heap)
    while heap:
        _, new, i, a, b = heapq.heappop(heap)
        j = after[i]
        if ids[i] != a or j >= n or ids[j] != b:
            continue                    # one of the two was merged with its other neighbour
        ids[i], ids[j], k = new, -1, after[j]
        after[i] = k
        if k < n:
            before[k] = i
            if (p := (new, ids[k])) in ranks:
                heapq.heappush(heap, (*ranks[p], i, *p))
        h = before[i]
        if h >= 0 and (p := (ids[h], new)) in ranks:
            heapq.heappush(heap, (*ranks[p], h, *p))
    return [x for x in ids if x >= 0]


class WordTokenizer(BaseTokenizer):
    """A token for each of the given words (matches of \\w+|. in the text), <unk> for every other one."""
    pattern_text = r'(?s)\w+|.'

    def __init__(self, words, special_tokens=(END_OF_TEXT,)):
        """words: the texts of ids 0, 1, ...; <unk> and the special tokens follow."""
        self.words = list(words)
        self.pattern = regex.compile(self.pattern_text)
        self.set_vocab(enumerate(w.encode() for w in self.words), [UNKNOWN, *(special_tokens or ())])
        self.unknown = self.special_ids.pop(UNKNOWN)
        self.special = special_pattern(self.special_ids)       # a text can not ask for <unk> by name

    @classmethod
    def train(cls, counts, vocab_size=0, special_tokens=(END_OF_TEXT,)):
        """{word: count} -> the tokenizer with the most frequent words (all of them for vocab_size 0)."""
        words = sorted((w for w in counts if w not in (UNKNOWN, *special_tokens)), key=lambda w: (-counts[w], w))
        return cls(words[:vocab_size - 1 - len(special_tokens)] if vocab_size else words, special_tokens)

    def word_ids(self, word):
        return [self.id_of.get(word.encode(), self.unknown)]

    def as_json(self):
        pre = {'type': 'Split', 'pattern': {'Regex': self.pattern_text.replace('(?s)', '').replace('.', r'[\s\S]')},
               'behavior': 'Removed', 'invert': True}
        model = {'type': 'WordLevel', 'vocab': {b.decode(): i for i, b in self.vocab.items()}, 'unk_token': UNKNOWN}
        return tokenizer_json(self, pre, model, {'type': 'Fuse'})


class CharTokenizer(WordTokenizer):
    """A token for each character of an alphabet, <unk> for every other one."""
    pattern_text = r'(?s).'

    @classmethod
    def train(cls, counts, vocab_size=0, special_tokens=(END_OF_TEXT,)):
        """An alphabet (anything that yields characters) -> the tokenizer, ids in the order of code points."""
        return cls(sorted(set(counts)), special_tokens)

# -----------------------------------------------------------------------------
# tokenizer.json, the file format of Hugging Face `tokenizers`

def byte_to_char():
    """GPT-2's table: each byte as a character that prints, so that a token can be a key in JSON."""
    keep = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(others)}


TO_CHAR = byte_to_char()
TO_BYTE = {c: b for b, c in TO_CHAR.items()}


def printable(token):
    return ''.join([TO_CHAR[b] for b in token])


def from_printable(token):
    return bytes([TO_BYTE[c] for c in token])


def tokenizer_json(tok, pre_tokenizer, model, decoder):
    added = [{'id': i, 'content': t, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False,
              'special': True} for t, i in tok.special_ids.items()]
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': sorted(added, key=lambda t: t['id']),
            'normalizer': None, 'pre_tokenizer': pre_tokenizer, 'post_processor': None, 'decoder': decoder,
            'model': model}


def load_tokenizer(path):
    """
    Opens any tokenizer.json that `save` wrote, and the byte-level BPE ones of Hugging Face (GPT-2's and GPT-4's
    patterns), with the ids as they are in the file. Raises UserError for anything else.
    """
    data = read_json(path)
    try:
        model, pre = data['model'], data['pre_tokenizer']
        specials = {t['content']: t['id'] for t in data['added_tokens']}
        if model.get('type') == 'WordLevel':
            words = [w for w, _ in sorted(model['vocab'].items(), key=lambda x: x[1])]
            kind = CharTokenizer if pre['pattern']['Regex'] == r'[\s\S]' else WordTokenizer
            tok = kind([w for w in words if w not in specials and w != UNKNOWN], list(specials))
            if any(tok.id_of.get(w.encode()) != i for w, i in model['vocab'].items()):
                raise ValueError('the ids are not in our order')
            return tok
        vocab = {i: t.encode() if t in specials else from_printable(t) for t, i in model['vocab'].items()}
        vocab.update({i: t.encode() for t, i in specials.items()})
        merges = [tuple(map(from_printable, m.split(' ') if isinstance(m, str) else m)) for m in model['merges']]
        if any(not 0 <= i < 1 << 24 for i in vocab) or any(len(m) != 2 for m in merges):
            raise ValueError('an id or a merge is out of range')
        if data.get('normalizer') or model.get('ignore_merges') or model.get('byte_fallback'):
            raise ValueError('its normalizer, ignore_merges or byte_fallback is not known here')
        return Tokenizer(vocab, merges, list(specials), find_pattern(pre))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, UnicodeEncodeError) as e:
        raise UserError(f'{path} is no tokenizer this project can use ({e}); byte-level BPE with the pattern of GPT-2 '
                        f'or GPT-4 works, as do those that prepare.py makes')


def find_pattern(pre):
    """The name of our pattern that a pre_tokenizer of a tokenizer.json stands for."""
    if pre['type'] == 'ByteLevel' and pre.get('use_regex', True) and not pre.get('add_prefix_space', True):
        return 'gpt2'
    if pre['type'] == 'Sequence':
        for part in pre['pretokenizers']:
            for name, text in PATTERNS.items():
                if part['type'] == 'Split' and part['pattern'] == {'Regex': text}:
                    return name
    raise ValueError('its pre_tokenizer is not known here')


BaseTokenizer.load = staticmethod(load_tokenizer)
