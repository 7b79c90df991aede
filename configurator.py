"""
Settings without a framework. A script lists its knobs as plain globals and reads the command line under them:

    batch_size = 12      # sequences per optimizer step
    config = configure(globals())

    $ python train.py config/train_names.py --batch_size=32
    batch_size = 32  (--batch_size=32)

Arguments are read from left to right and later ones win. An argument is a Python file that assigns knobs (it sees
the knobs so far, so it can compute with them; names in CAPITALS or with a leading underscore are its own), or
--key=value. A knob is a lower-case global that is a bool, an int, a float or a str; the comment beside it is its
--help. Only a script that was launched reads the command line: importing it changes nothing. Four sections are about
something else: files that are whole or not there, what happens to a long run, several processes that train together, and
long texts in blocks, on all cores.
"""
import contextlib
import difflib
import errno
import gzip
import hashlib
import http.client
import json
import lzma
import math
import multiprocessing
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
import types
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path

import regex
from tqdm import tqdm

KINDS = {bool: 'True or False', int: 'a whole number below 2^63', float: 'a number', str: 'a text without NUL, in UTF-8'}

# what people type from habit, and what it is called here
FOREIGN = {
    'gradient_accumulation_steps': 'batch_size counts all sequences of an optimizer step here: set batch_size to '
        "nanoGPT's batch_size * gradient_accumulation_steps, and micro_batch_size to nanoGPT's batch_size",
    'eval_iters': 'validation reads the same windows every time: set eval_tokens to eval_iters * batch_size * block_size',
    'decay_lr': 'set --min_lr to the learning rate for a constant one',
    'always_save_checkpoint': 'a checkpoint is saved at every evaluation, and the best is kept',
    **dict.fromkeys(('what', 'arms'), 'it is a knob of bench.py: `python bench.py` with these arguments'),
    'muon': 'write --optimizer=muon, or --optimizer=adamw',
    'num_epochs': 'set max_iters; the start-up lines say how many epochs that is',
}

class UserError(Exception):
    """A mistake that a person can make and mend. The message is one line that ends with what to do next."""
    status, kind = 2, 'error'       # of the process, and how the line begins

class Diverged(UserError):
    """The loss or the gradient is no longer finite, or the weights of the processes differ."""
    status, kind = 3, 'diverged'

class Locked(UserError):
    """Another process is at it."""

def launch(main):
    """
    Runs a script's main: a UserError becomes one line and its status; a bug of ours keeps its traceback. One process of
    several ends without the interpreter's own end, in which threads of torch may still wait for the others.
    """
    status = 1
    try:
        main()
        status = 0
    except UserError as e:
        status = tell(e)
    except BrokenPipeError:     # `| head` closed our output: nobody is listening, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 0
    except KeyboardInterrupt:
        print('\nstopped', file=sys.stderr)
        status = 130
    except SystemExit as e:
        status = e.code or 0
    except BaseException as e:
        if refusal := refused(e):
            status = tell(refusal)
        elif 'RANK' not in os.environ:
            raise
        else:
            traceback.print_exc()
    if 'RANK' in os.environ:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)

def refused(error):
    """What the machine refused (room on a disk, memory, a path) as a UserError; None for any other exception."""
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and re.search('(allocate|enough|out of) memory', str(error)):
        return UserError('this does not fit into the memory: try a smaller model, context or file, or fewer sequences at once')
    if isinstance(error, OSError) and disk_is_full(error):
        return UserError(f'the disk is full ({error}): make room and run this again; what was saved before is whole')
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(f'can not use {error.filename}: {error.strerror}; check the path, and whether you may write there')

def tell(error):
    text = ' '.join(str(error).split())
    text = text if len(text) < 2000 else f'{text[:1000]} ... {text[-500:]}'     # it may quote a file
    if text:            # of several processes one may speak for all
        print(f'{error.kind}: {visible(text)}', file=sys.stderr, flush=True)
    return error.status

def say(*lines):
    """Prints, and goes on where nobody listens any more: a closed pipe, a terminal that is gone."""
    try:
        print(*lines, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

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
    return error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, 'EDQUOT', errno.ENOSPC))

def sync(path):
    """Makes sure that a file, or the names in a folder, are on the disk, from where it is read the next time."""
    if os.name == 'nt' and os.path.isdir(path):
        return                  # Windows can not open a folder
    f = os.open(path, os.O_RDONLY if os.name != 'nt' else os.O_RDWR)
    try:
        os.fsync(f)
        if hasattr(os, 'posix_fadvise'):
            os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(f)

def stamps(paths):
    """What changes with a file: [bytes, time of the last change of its text, of anything, inode] of each. Raises UserError."""
    try:
        return [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in map(os.stat, paths)]
    except OSError as e:
        raise UserError(f'can not read {e.filename}: {e.strerror}; put it back, or run this again when nothing changes the files')

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

LOCKS = {}      # path: the open file, whose lock ends with this process however that ends

def lock(path, meaning):
    """
    Takes a lock for this process, in a folder that is made if need be. Raises UserError: with this meaning if another
    process has it, and where the folder can not be written.
    """
    folder, path = os.path.dirname(path) or '.', os.path.abspath(path)
    if path in LOCKS:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        f = open(path, 'a+', encoding='utf-8')
    except OSError as e:
        raise UserError(f'can not write to {folder}: {e.strerror}; free or move it, or give another folder')
    try:
        if os.name == 'nt':
            import msvcrt
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)       # which a child does not inherit, and NFS knows
    except (BlockingIOError, PermissionError):
        f.close()
        raise Locked(meaning)
    except OSError:             # a file system without locks
        pass
    LOCKS[path] = f

def unlock(path):
    if f := LOCKS.pop(os.path.abspath(path), None):
        f.close()

def download(url, path, sha256=None, timeout=30):
    """
    Fetches a URL into a file, unless it is there, and returns the path. Nothing stands under the final name until its size
    and, where known, its sha256 are right and it is on the disk. Raises UserError after three tries.
    """
    path = Path(path)
    while not path.exists():
        try:
            lock(path.with_name(f'.{path.name}.lock'), f'another process is fetching {path}: wait for it, or stop it')
        except Locked:
            if os.environ.get('WORLD_SIZE', '1') == '1':
                raise
            time.sleep(0.5)     # another process of this run is fetching it
            continue
        if not path.exists():
            transfer(url, path, sha256, timeout)
    return path

def transfer(url, path, sha256, timeout):
    """Goes on where an earlier try stopped if the server says, by what names this state of the file, that it is the same."""
    part, mark = path.with_name(path.name + '.part'), path.with_name(path.name + '.part.etag')
    for attempt in range(3):
        try:
            have = part.stat().st_size if part.exists() else 0
            tag = ' '.join(mark.read_bytes().decode('latin-1').split()) if have and mark.exists() else ''
            request = urllib.request.Request(url, headers={'Range': f'bytes={have}-', 'If-Range': tag} if tag else {})
            with urllib.request.urlopen(request, timeout=timeout) as r:
                etag, length = r.headers.get('ETag') or 'W/', r.headers.get('Content-Length')
                now = r.headers.get('Last-Modified') or '' if etag.startswith('W/') else etag      # W/: about the same
                if r.status == 206:
                    m = re.fullmatch(r'bytes (\d+)-\d+/(\d+)', r.headers.get('Content-Range') or '')
                    if not m or not tag or int(m[1]) != have or now not in ('', tag):
                        part.unlink(missing_ok=True)
                        raise OSError('another part came than the one asked for')
                    total = int(m[2])
                elif r.status == 200:       # all of it
                    have, total = 0, int(length) if length else None
                else:
                    raise OSError(f'status {r.status}')
                with open(part, 'ab' if have else 'wb') as f, \
                        tqdm(total=total, initial=have, unit='B', unit_scale=True, desc=path.name, disable=None) as bar:
                    if not have:            # subtle: after the old part is gone
                        mark.write_bytes(now.encode('latin-1'))
                    while block := r.read(1 << 20):
                        f.write(block)
                        bar.update(len(block))
            size = part.stat().st_size
            if not size or total not in (None, size):
                if total is not None and size > total:
                    part.unlink()
                raise OSError(f'{size:,} of {total or 0:,} bytes came')
            if sha256 and file_sha256(part) != sha256:
                part.unlink()
                raise OSError('the sha256 is wrong')
            sync(part)
            os.replace(part, path)
            sync(path.parent)
            mark.unlink(missing_ok=True)
            return
        except (OSError, http.client.HTTPException, ValueError) as e:
            problem = e
            if isinstance(e, urllib.error.HTTPError):
                if e.code == 416:           # the part is no beginning of this file
                    part.unlink(missing_ok=True)
                elif e.code < 500:
                    break
            elif isinstance(e, OSError) and disk_is_full(e):
                raise
    raise UserError(f'can not download {url} ({problem}): put the file at {path} by hand and run this again; '
                    f'--dataset=python and your own files need no network')

# -----------------------------------------------------------------------------
# a long run and what happens to it

class StopSignal:
    """
    Hears SIGINT, SIGTERM, SIGHUP and SIGUSR1. Until there is something to save (ready) one of them ends the process, with
    status 128 + its number; from then on it is only noted, as `signal`, for the loop to end by, and a second Ctrl-C ends it
    at once. A thread ends what has not ended `limit` seconds after it: a process can wait in vain for another one.
    """
    patience, current = 10.0, None      # seconds; the one of this process

    def __init__(self):
        if StopSignal.current:
            StopSignal.current.end()
        StopSignal.current = self
        self.signal, self.heard, self.ready, self.limit, self.before = 0, math.inf, False, self.patience, {}
        for s in (getattr(signal, name, None) for name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1')):
            if s and signal.getsignal(s) != signal.SIG_IGN:         # nohup wants it so
                self.before[s] = signal.signal(s, self.hear)
        # the handler runs when the interpreter does, but this byte is written even while torch waits
        self.pipe = socket.socketpair()
        self.pipe[0].settimeout(0.5), self.pipe[1].setblocking(False)
        self.fd = signal.set_wakeup_fd(self.pipe[1].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self.watch, args=(os.getppid(),), daemon=True).start()

    def hear(self, signum, frame):
        if not self.ready:
            os.write(2, f'\nstopped by {signal.Signals(signum).name}: nothing new to save\n'.encode())     # print may be at work
            os._exit(128 + signum)
        # torchrun passes a Ctrl-C on, so that it comes twice
        if self.signal and signum == signal.SIGINT and time.monotonic() > self.heard + 1:
            raise KeyboardInterrupt
        self.signal, self.heard = signum, min(self.heard, time.monotonic())

    def watch(self, parent):
        first = signal.SIGTERM
        while True:
            with contextlib.suppress(TimeoutError):
                if not (byte := self.pipe[0].recv(1)):
                    return self.pipe[0].close()
                if byte[0] in self.before and self.heard == math.inf:
                    first, self.heard = byte[0], time.monotonic()
            if 'TORCHELASTIC_RUN_ID' in os.environ and os.getppid() != parent and self.heard == math.inf:
                os.kill(os.getpid(), signal.SIGTERM)        # torchrun is gone, and nobody owns this process
            if time.monotonic() > self.heard + self.limit:
                os._exit(128 + first)

    def end(self):
        """Signals mean again what they meant before."""
        signal.set_wakeup_fd(self.fd)
        for s, handler in self.before.items():
            signal.signal(s, handler)
        self.pipe[1].close()

def read_log(path):
    """The lines of a log, without those that were not written to their end."""
    entries = []
    for line in path.read_text(encoding='utf-8').splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            pass
    return entries

def cut_log(path, step):
    """Drops what was logged after a checkpoint, before training goes on from it."""
    kept = [e for e in read_log(path) if (e['step'] <= step if 'val_loss' in e else e['step'] < step)]
    write_whole(path, ''.join(json.dumps(e) + '\n' for e in kept))

class Wandb:
    """
    Weights & Biases if it is asked for, in a thread of its own: nothing that it does, fails to do or waits for stops a run.
    """
    patience = 10.0     # seconds

    def __init__(self, on, **settings):
        self.calls, self.thread = queue.Queue(), threading.Thread(target=self.work, daemon=True)
        if on:
            self.thread.start()
        self.call('init', **settings)

    def call(self, *call, **kwargs):
        if self.thread.is_alive():
            self.calls.put((call, kwargs))

    def work(self):
        try:
            import wandb
            name = None
            while name != 'finish':
                (name, *args), kwargs = self.calls.get()
                getattr(wandb, name)(*args, **kwargs)
        except BaseException as e:      # whatever it is, training is worth more
            say(f'wandb failed and is off for this run: {type(e).__name__}: {e}')

    def finish(self):
        self.call('finish')
        if self.thread.is_alive():
            self.thread.join(self.patience)
            if self.thread.is_alive():
                say('wandb does not answer: it may lack the end of this run')

def duration(seconds):
    """duration(4000) -> '1 h 7 min'"""
    s = round(seconds)
    return f'{s} s' if s < 60 else f'{s // 60} min {s % 60} s' if s < 3600 else \
        f'{s // 3600} h {s % 3600 // 60} min' if s < 86400 else f'{seconds / 86400:.1f} days'

def short(n):
    """short(412345) -> '412k'"""
    return f'{n / 1e6:.2f}M' if n >= 1e6 else f'{n / 1e3:.0f}k' if n >= 1e4 else f'{n:.0f}'

# -----------------------------------------------------------------------------
# several processes

class Lost(UserError):
    """Another process is gone, or does not answer."""
    status = 1

def setup_ranks():
    """-> rank, local_rank, world_size, from what torchrun sets."""
    return tuple(int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))

def connect(place, world_size, timeout=600):
    """Joins the processes. timeout: seconds that they wait for each other."""
    if world_size > 1:
        import torch.distributed as dist        # preparing data needs no torch
        wait, rank = timedelta(seconds=timeout), int(os.environ['RANK'])
        store = next(dist.rendezvous('env://', timeout=wait))[0]
        backend = 'nccl' if place.startswith('cuda') and dist.is_nccl_available() else 'gloo'
        dist.init_process_group(backend, timeout=wait, rank=rank, world_size=world_size,
                                store=dist.PrefixStore(meet(store, rank, world_size, timeout), store))

def meet(store, rank, world_size, timeout):
    """
    A name that only the processes of this start have. The store of torchrun outlives a restart and still holds the
    addresses of processes that are gone: rank 0 answers every greeting it finds until all who live have its name.
    """
    name, deadline = os.urandom(8).hex(), time.monotonic() + timeout
    if rank > 0:
        store.set(f'greeting/{rank}', name)
        name = store.get(f'answer/{name}').decode()
        store.set(f'here/{name}/{rank}', '')
    while rank == 0 and not store.check([f'here/{name}/{r}' for r in range(1, world_size)]):
        for r in range(1, world_size):
            if store.check([f'greeting/{r}']):
                store.set(f'answer/{store.get(f"greeting/{r}").decode()}', name)
        if time.monotonic() > deadline:
            raise Lost(f'not all {world_size} processes came within {timeout} s: look at what the others say')
        time.sleep(0.01)
    return name

def all_reduce(x, op='SUM'):
    """dist.all_reduce. Raises Lost where another process is gone."""
    import torch.distributed as dist
    try:
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
    except RuntimeError as e:
        # torchrun ends this process within that time if another one failed first, and names that one
        signal.signal(signal.SIGTERM, signal.SIG_DFL), time.sleep(3)
        raise Lost(f'rank {os.environ["RANK"]} waits in vain for another process ({str(e).splitlines()[0]}): torchrun names the '
                   f'one that failed first; go on with --init_from=auto')

def check_alike(step, optimizer, world_size):
    """
    Whether all is well, for all processes alike: False if a weight or, at an earlier step, a gradient is not finite.
    Raises Diverged if not all processes have the same weights, which they compare by a hash of the bits.
    """
    import torch
    well = optimizer.alive & optimizer.p.sum().isfinite()
    if world_size == 1:
        return bool(well)
    bits = (optimizer.p.view(torch.int32).view(4096, -1).sum(1) * torch.arange(1, 8192, 2, device=well.device)).sum()
    found = torch.stack([well.long(), bits, -bits])
    all_reduce(found, 'MIN')
    well, low, high = found.tolist()
    if well and low != -high:
        raise Diverged(f'the processes have different weights at step {step}: a machine computes wrongly; nothing after the last '
                       f'checkpoint was saved, go on with --init_from=resume on other hardware')
    return bool(well)

def read_later(numbers, place):
    """-> a function that gives a few numbers of the device, and waits for nothing if they have long been computed."""
    copy, event = numbers.clone().to('cpu', non_blocking=True), None
    if place.startswith('cuda'):
        import torch
        event = torch.cuda.Event()
        event.record()
    return lambda: (event and event.synchronize(), copy.tolist())[1]

def leave(place, world_size):
    """Ends the work of several processes, when all have come here."""
    if world_size > 1:
        import torch
        all_reduce(torch.zeros(1, device=place))
        torch.distributed.destroy_process_group()

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
        sys.exit(tell(e) if is_rank_0() else e.status)
    for space in spaces:
        space.update({k: v for k, v in knobs.items() if is_knob(k, space.get(k))})
    if is_rank_0() and not quiet:
        for k, where in source.items():
            print(f'{k} = {text if len(text := repr(knobs[k])) < 200 else text[:100] + " ..."}  ({where})')
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

def smaller_config():
    """What to run instead where this would take days: the _cpu variant of the config file, if there is one."""
    for arg in sys.argv[1:]:
        other = arg.replace('.py', '_cpu.py')
        if arg.endswith('.py') and os.path.exists(other):
            return f'python train.py {other}'
    return 'python train.py'

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

def open_file(path):
    """A binary file, unpacked as its name says: .gz, .xz or .zst."""
    suffix = path.suffix.lower()
    if suffix == '.gz':
        return gzip.open(path, 'rb')
    if suffix == '.xz':
        return lzma.open(path, 'rb')
    if suffix == '.zst':
        try:
            from compression import zstd        # Python 3.14
        except ImportError:
            try:
                from backports import zstd
            except ImportError:
                raise UserError(f'{path} needs a package: pip install backports.zstd')
        return zstd.open(path, 'rb')
    return open(path, 'rb')

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

def peak_memory():
    """-> (bytes of this process at most, bytes of the largest child that has ended); 0 where that is not known"""
    try:
        import resource
    except ImportError:                 # Windows
        return 0, 0
    unit = 1 if sys.platform == 'darwin' else 1024
    return [resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
