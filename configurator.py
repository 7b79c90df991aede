"""
Settings without a framework. A script lists its knobs as plain globals and reads the command line under them:

    batch_size = 12      # sequences per optimizer step
    config = configure(globals())

    $ python train.py config/train_names.py --batch_size=32
    batch_size = 32  (--batch_size=32)

Arguments are read from left to right and later ones win. An argument is a Python file that assigns knobs (it sees
the knobs so far, so it can compute with them; names in CAPITALS or with a leading underscore are its own), or
--key=value. A knob is a lower-case global that is a bool, an int, a float or a str; the comment beside it is its
--help. Only a script that was launched reads the command line: importing it changes nothing. The last two sections are
about something else: files that are whole or not there, and long texts in blocks, on all cores.
"""
import difflib
import errno
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import types
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice

import regex

KINDS = {bool: 'True or False', int: 'a whole number below 2^63', float: 'a number', str: 'a text without NUL, in UTF-8'}

# what people type from habit, and what it is called here
FOREIGN = {
    'gradient_accumulation_steps': 'batch_size counts all sequences of an optimizer step here: set batch_size to '
        "nanoGPT's batch_size * gradient_accumulation_steps, and micro_batch_size to nanoGPT's batch_size",
    'eval_iters': 'validation reads the same windows every time: set eval_tokens to eval_iters * batch_size * block_size',
    'decay_lr': 'set --min_lr to the learning rate for a constant one',
    'always_save_checkpoint': 'a checkpoint is saved at every evaluation, and the best is kept',
    'num_epochs': 'set max_iters; the start-up lines say how many epochs that is',
}

class UserError(Exception):
    """A mistake that a person can make and mend. The message is one line that ends with what to do next."""
    status, kind = 2, 'error'       # of the process, and how the line begins

def launch(main):
    """Runs a script's main: a mistake becomes one line and exit status 2; a bug of ours keeps its traceback."""
    try:
        main()
    except UserError as e:
        stop(e)
    except BrokenPipeError:     # `| head` closed our output: nobody is listening, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, MemoryError, RuntimeError) as e:
        if (refusal := refused(e)) is None:
            raise
        stop(refusal)
    except KeyboardInterrupt:
        print('\nstopped', file=sys.stderr)
        sys.exit(130)

def refused(error):
    """What the machine refused (room on a disk, memory, a path) as a UserError; None for any other exception."""
    if isinstance(error, MemoryError) or re.search('(allocate|enough|out of) memory', str(error)):      # torch has no class for it
        return UserError('this does not fit into the memory: try a smaller model, context or file, or fewer sequences at once')
    if isinstance(error, OSError) and disk_is_full(error):
        return UserError(f'the disk is full ({error}): make room and run this again; what was saved before is whole')
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(f'can not use {error.filename}: {error.strerror}; check the path, and whether you may write there')

def stop(error):
    text = ' '.join(str(error).split())
    text = text if len(text) < 2000 else f'{text[:1000]} ... {text[-500:]}'     # it may quote a file
    print(f'{error.kind}: {visible(text)}', file=sys.stderr, flush=True)
    sys.exit(error.status)

def visible(text):
    """Control characters, which could steer a terminal, as escapes; line breaks and tabs stay."""
    return ''.join(c if c in '\n\t' or c.isprintable() else c.encode('unicode_escape').decode() for c in text)

def read_json(path):
    """The object in a JSON file, as a dict. Raises UserError."""
    try:
        with open(path, encoding='utf-8') as f:
            data = json.load(f)
        if not isinstance(data, dict):
            raise ValueError('it is no JSON object')
        return data
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f'can not read {path}: {getattr(e, "strerror", None) or e}; check the path, or make it again')

def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

# -----------------------------------------------------------------------------
# files that are whole or not there, and folders that one process writes

def disk_is_full(error):
    """Whether an OSError says that a disk, a quota or a limit on the size of files is reached."""
    return error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, 'EDQUOT', None))

def sync(path):
    """Makes sure that a file, or the names in a folder, are on the disk."""
    if os.name == 'nt' and os.path.isdir(path):
        return                  # Windows can not open a folder
    f = os.open(path, os.O_RDONLY if os.name != 'nt' else os.O_RDWR)
    try:
        os.fsync(f)
    finally:
        os.close(f)

def write_whole(path, text):
    """Puts a text into a file at once: whatever happens, it holds the old text or the new one."""
    partial = os.path.join(os.path.dirname(path), f'.{os.path.basename(path)}.partial')
    try:
        with open(partial, 'w', encoding='utf-8', newline='\n') as f:
            f.write(text)
        sync(partial)
        os.replace(partial, path)
        sync(os.path.dirname(path) or '.')
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise

LOCKS = {}      # path: the open file, whose lock ends with this process, however that ends

def lock(path, meaning):
    """Takes a lock for this process. Raises UserError, saying what it means, if another process has it."""
    if (path := os.path.abspath(path)) in LOCKS:
        return
    f = open(path, 'a+', encoding='utf-8')
    try:
        if os.name == 'nt':
            import msvcrt
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)       # which a child does not inherit, and NFS knows
    except (BlockingIOError, PermissionError):
        f.close()
        raise UserError(meaning)
    except OSError:             # a file system without locks
        pass
    LOCKS[path] = f

# -----------------------------------------------------------------------------
# knobs

def is_rank_0():
    return os.environ.get('RANK', '0') == '0'

def configure(script, *others, argv=None, quiet=False):
    """
    Overrides the knobs of a script from its command line and returns all of them as a dict.

    script: the globals() of the script; others: globals of modules whose knobs it takes too (bench.py takes those
    of train.py). argv: the arguments, by default those of the command line if the script was launched, else none.
    quiet: do not report what was overridden.
    Raises UserError (a launched script prints it and exits with status 2) for anything that can not be read.
    """
    launched = argv is None and script['__name__'] == '__main__'
    if launched:
        for stream in (sys.stdout, sys.stderr):     # a console or pipe that is not UTF-8 gets escapes, not a traceback
            stream.reconfigure(errors='backslashreplace')
        write = sys.stdout.write        # no text, name or knob can steer the terminal
        sys.stdout.write = lambda text: write(visible(text))
    spaces = (script, *others)
    defaults = {k: v for space in reversed(spaces) for k, v in space.items() if is_knob(k, v)}
    if argv is None:
        argv = sys.argv[1:] if launched else []
    try:
        if '--help' in argv or '-h' in argv:
            launch(lambda: print_help(spaces, defaults))
            sys.exit(0)
        knobs, source = read_arguments(argv, defaults)
    except UserError as e:
        if not launched:
            raise
        if not is_rank_0():
            sys.exit(2)
        stop(e)
    for space in spaces:
        space.update({k: v for k, v in knobs.items() if is_knob(k, space.get(k))})
    if is_rank_0() and not quiet:
        for k, where in source.items():
            print(f'{k} = {knobs[k]!r}  ({where})')
    return knobs

def is_knob(name, value):
    return name.islower() and not name.startswith('_') and type(value) in KINDS

def read_arguments(argv, defaults):
    """argv, defaults -> (the knobs after all arguments, {name of each that was set: by what})"""
    knobs, source = dict(defaults), {}
    for arg in argv:
        if arg.startswith('--'):
            name, equals, text = arg[2:].partition('=')
            known(name, defaults, arg)
            if not equals and isinstance(defaults[name], bool):
                text = 'True'       # a switch: --wandb_log
            elif not equals:
                raise UserError(f'{arg} needs a value: write --{name}=value')
            found = {name: parse(name, text, defaults[name])}
        elif arg.endswith('.py'):
            found = run_file(arg, knobs, defaults)
        else:
            raise UserError(f'can not read the argument {arg!r}: give a config file (*.py) or --key=value')
        knobs.update(found)
        source.update(dict.fromkeys(found, arg))
    return knobs, source

def known(name, defaults, where):
    if name in defaults:
        return
    if name in FOREIGN:
        raise UserError(f'{where}: there is no {name} here: {FOREIGN[name]}')
    near = difflib.get_close_matches(name, defaults, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise UserError(f'{where}: there is no knob {name!r}: {hint}--help lists them')

def is_plain(value):
    """Whether a number is finite and of a size that makes sense, and a text one that a path and a file can hold."""
    if type(value) is str:
        return not re.search('[\0\ud800-\udfff]', value)
    return abs(value) < (1 << 63 if type(value) is int else 1e300)

def check_ranges(knobs, *rows):
    """Raises UserError for a knob that is out of its range. A row: least, most, names."""
    for least, most, names in rows:
        for name in names.split():
            if not least <= knobs[name] <= most:
                raise UserError(f'{name} = {knobs[name]}: give a number from {least} to {most:,}')

def parse(name, text, default):
    """The text of a --name=text as the type of the default: parse('lr', '1', 0.5) -> 1.0"""
    kind = type(default)
    if default == 'auto' or kind is bool:
        if text in ('True', 'true', 'False', 'false'):
            return text in ('True', 'true')
    try:
        if kind is not bool and is_plain(kind(text)):
            return kind(text)
    except ValueError:
        pass
    raise UserError(f'--{name}={text}: {name} takes {KINDS[kind]}, such as --{name}={default}')

def run_file(path, knobs, defaults):
    """Runs a config file over the knobs so far and returns the ones it changed."""
    names = dict(knobs, __file__=path)
    try:
        with open(path, encoding='utf-8-sig') as f:
            text = f.read()
    except (OSError, ValueError) as e:
        raise UserError(f'can not read the config file {path}: {getattr(e, "strerror", None) or e}; '
                        f'`ls config` shows those that come with the project')
    try:
        exec(compile(text, path, 'exec'), names)
    except BaseException as e:      # whatever a person's file raises is that file's mistake
        line = getattr(e, 'lineno', None)
        tb = e.__traceback__
        while tb is not None and not isinstance(e, SyntaxError):
            if tb.tb_frame.f_code.co_filename == path:
                line = tb.tb_lineno
            tb = tb.tb_next
        raise UserError(f'{path}, line {line}: {type(e).__name__}: {e}; mend the file and run it again')
    found = {}
    for name, value in names.items():
        own = isinstance(value, types.ModuleType) or callable(value)
        if name.startswith('_') or not name.islower() or own and name not in defaults:
            continue
        known(name, defaults, path)
        default = defaults[name]
        if type(default) is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        if not (type(value) is type(default) or default == 'auto' and type(value) is bool) or not is_plain(value):
            raise UserError(f'{path}: {name} takes {KINDS[type(default)]}, such as {default!r}')
        if value != knobs[name] or type(value) is not type(knobs[name]):
            found[name] = value
    return found

def as_file(knobs):
    """The knobs as the text of a config file, which sets them again."""
    return ''.join(f'{k} = {v!r}\n' for k, v in knobs.items())

def print_help(spaces, knobs):
    """The docstring of the script, then its knobs with the comments beside them."""
    print((spaces[0].get('__doc__') or '').strip() + '\n')
    for space in spaces:
        with open(space['__file__'], encoding='utf-8') as f:
            lines = f.read().splitlines()
        shown = False
        for line in lines:
            m = re.match(r'([a-z]\w*) = .*?(?:  # (.*))?$', line)
            if m and m[1] in knobs:
                print(f'  --{m[1]}={knobs[m[1]]!r}'.ljust(34) + ' ' + (m[2] or ''))
                shown = True
            elif shown and re.match(r' {8,}# ', line):      # the comment goes on
                print(' ' * 35 + line.strip()[2:])
            elif re.match(r'# (?!-)', line) and shown:
                print('\n' + line)
            elif 'configure(' in line:
                break
        print()

# -----------------------------------------------------------------------------
# long texts: in blocks, on all cores

BLOCK = 1 << 21     # bytes that one process takes at a time
SMALL = 2           # as many blocks do not pay for processes

# where a text may be cut without changing its tokens under any pattern of tokenizer.py: after a letter or digit, before
# what is neither. (?r) searches from the right.
SAFE_CUT = regex.compile(r'(?r)(?<=[\p{L}\p{N}])(?=[^\w\p{N}])')

def special_pattern(special_tokens, form=str):
    """Splits str (or bytes) at special tokens, the longest where several fit, and keeps them; None if there are none."""
    tokens = sorted(special_tokens, key=len, reverse=True)
    if '' in tokens:
        raise UserError('a special token can not be empty; remove it')
    text = f'({"|".join(map(re.escape, tokens))})'
    return re.compile(text if form is str else text.encode()) if tokens else None

def blocks(chunks, size, special_tokens=()):
    """Joins chunks of UTF-8 bytes to blocks of about `size`, cut where no token can cross, wherever the chunks were cut."""
    special, longest = special_pattern(special_tokens, bytes), max((len(t.encode()) for t in special_tokens), default=1)
    rest, wanted = bytearray(), size
    for chunk in chunks:
        rest += chunk
        if len(rest) < wanted:
            continue
        raw, cut, after, sight = bytes(rest), 0, 0, len(rest) - longest     # what begins by `sight` is there as a whole
        for m in special.finditer(raw) if special else ():
            if m.start() > sight:
                break
            cut, after = m.start(), m.end()
        if cut < len(raw) // 2 and (m := SAFE_CUT.search(raw[after:max(after, sight)].decode(errors='ignore'))):
            cut = after + len(m.string[:m.start()].encode())
        if cut:
            yield raw[:cut]
            del rest[:cut]
        wanted = max(size, 2 * len(rest))               # what has no cut is not looked at for every chunk
    yield bytes(rest)

def read_blocks(file, name, special_tokens=()):
    """The blocks of a binary file; joined, they are the file. Raises UserError where the bytes are not UTF-8."""
    offset = 0
    for block in blocks(iter(lambda: file.read(BLOCK), b''), BLOCK, special_tokens):
        try:
            block.decode()
        except UnicodeDecodeError as e:
            raise UserError(f'{name} is not UTF-8: byte {offset + e.start} is {block[e.start]:#04x} ({e.reason}); convert '
                            f'the file first, for example with iconv -t utf-8')
        offset += len(block)
        if block:
            yield block

# a fork shares what is already imported; where it is missing (Windows) or unsafe (macOS) a new Python starts
START_METHOD = 'fork' if sys.platform == 'linux' else 'spawn'

def parallel_map(function, items, workers):
    """
    map(function, items) in order, in other processes, with at most a few items under way, so that a long input is
    never in memory as a whole. Up to SMALL items are done here: a small job does not pay for processes.
    """
    items = iter(items)
    first = list(islice(items, SMALL + 1 if workers > 1 else 0))
    if len(first) <= SMALL:
        yield from map(function, chain(first, items))
        return
    with ProcessPoolExecutor(min(workers, 61), multiprocessing.get_context(START_METHOD), set_work, (function,)) as pool:
        waiting = deque()
        for item in chain(first, items):
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers + 2:
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
