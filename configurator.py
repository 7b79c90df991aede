"""
Options without a framework. A script lists its options as plain globals, then reads the command line:

    batch_size = 12      # sequences per optimizer step
    config = configure(globals())

    $ python train.py config/train_names.py --batch_size=32
    batch_size = 32  (--batch_size=32)

Arguments are read from left to right and later ones win. An argument is --key=value (or --key for True) or a Python
file that assigns options. The file sees the options so far, so it can compute with them; names in CAPITALS or with a
leading underscore are its own. Only a script that was launched reads the command line; importing one changes nothing.

An option is a lower-case global of type bool, int, float or str. The comment next to it is shown by --help. It may
begin with what is checked, (>= 0, < 1) or (a, b or c), or with (path): there, ~ at the beginning is the home folder.
"""
import difflib
import errno
import hashlib
import inspect
import json
import operator
import os
import re
import runpy
import shlex
import shutil
import sys
from collections import UserDict, defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

class UserError(Exception):
    """A mistake that users can fix. The message is one line that ends with what to do next."""
    status = 2          # exit status
    kind = 'error'      # beginning of the line

KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text'}

class Options(UserDict):
    """
    Options by name. Each value stays where its option is listed, such as in the globals of a script. data: {option:
    those that list it}. defaults: their values before any was set. source: {option: the argument that set it}.
    comments: {option: its comment}.
    """
    def __init__(self, *homes, comments={}):
        """
        homes: dicts or other Options. If several list an option, as prepare.py and train.py do `dataset`, all are set,
        and the default of the last counts.
        """
        self.data = {}
        self.defaults = {}
        self.source = {}
        self.comments = defaultdict(str)
        for home in homes:
            values = home
            if isinstance(home, Options):
                values = home.defaults
                self.comments.update(home.comments)
            for name, value in values.items():
                if name.islower() and not name.startswith('_') and type(value) in KINDS:
                    self.data.setdefault(name, []).append(home)
                    self.defaults[name] = value
        self.comments.update(comments)

    def __getitem__(self, name):
        return self.data[name][-1][name]

    def __setitem__(self, name, value):
        for home in self.data[name]:
            home[name] = value

    def begin(self, arguments):
        """Sets options from arguments, and all others to their defaults. Raises UserError."""
        self.update(self.defaults)
        self.source.clear()
        self.read(arguments)

    def read(self, arguments):
        """Sets options from arguments, left to right. Raises UserError."""
        for argument in arguments:
            found = read_pair(argument, self) if argument.startswith('--') else run_file(argument, self)
            self.update(found)
            for name in found:
                self.source.pop(name, None)         # so that it comes last
                self.source[name] = argument

def configure(script, *others, quiet=False):
    """
    Overrides the options of a script from the command line, if it was launched, and returns all of them as Options.
    script: its globals(). others: modules and classes whose options it also takes, as train.py takes those of
    prepare.py and the fields of GPTConfig. Modules are changed, too; classes stay as they are. quiet: print nothing.
    """
    homes = [other.config if inspect.ismodule(other) else fields_of(other) for other in others]
    options = Options(*homes, script, comments=comments_of(sys.modules[script['__name__']]))

    if script['__name__'] == '__main__':
        with suppress(AttributeError):      # stdout may be closed (>&-), or Jupyter's
            # UTF-8 also in files on Windows, as from Python 3.15 on. A path may not be UTF-8
            sys.stdout.reconfigure(encoding='utf-8', errors='backslashreplace')
        if {'-h', '--help'} & {*sys.argv}:
            launch(lambda: print_help(others))
            sys.exit()
        launch(lambda: options.begin(sys.argv[1:]))

    if not quiet:
        for name, argument in options.source.items():
            print(f'{name} = {options[name]!r}  ({visible(argument)})')
    return options

def read_pair(argument, options):
    """Parses --name=text: --lr=1 -> {'lr': 1.0}. Raises UserError."""
    name, equals, value = argument[2:].partition('=')
    default = options.defaults.get(name)
    kind = type(default)
    if not equals:
        value = True            # a switch, such as --wandb_log; check_value() refuses it for most other options
    elif value.lower() in ('true', 'false') and (kind is bool or default == 'auto'):
        value = value.lower() == 'true'
    elif kind in (int, float):
        with suppress(ValueError):      # check_value() raises an error for what is not a number
            value = kind(value)
    return {name: check_value(value, name, options, argument)}

COMPARISONS = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt}

def check_value(value, name, options, where):
    """
    Returns a value in the type of the option's default (an int may become a float). Raises UserError unless it is of
    that type, and as the option's comment begins: '(>= 0, < 1) share ...' or '(a, b or c) ...'.
    """
    if name not in options:
        near = difflib.get_close_matches(name, options, 1)
        hint = f'did you mean {near[0]}? (--help lists all options)' if near else 'run with --help to list all options'
        raise UserError(f'unknown option {name} ({where}); {FOREIGN.get(name, hint)}')
    default = options.defaults[name]
    kind = type(default)
    allowed = re.match(r'(\((.+?)\))?', options.comments[name])[2] or ''           # in the parentheses at its beginning
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is str and allowed == 'path':
        before, colon, path = value.rpartition(':')         # auto:~/x
        value = before + colon + os.path.expanduser(path)           # a shell leaves the ~ of --x=~/y as it is
    switch = default == 'auto' and type(value) is bool
    if not switch and type(value) is not kind:
        raise UserError(f'{where}: bad value; {name} takes {KINDS[kind]}, such as --{name}={default}')
    limits = re.findall('([<>]=?) ([^,]+)', allowed)
    right = all(COMPARISONS[sign](value, float(bound)) for sign, bound in limits)
    if ' or ' in allowed:
        right = str(value) in re.split(', | or ', allowed)
    if not right:
        raise UserError(f'{name} = {value!r:.60} must be {allowed}; change --{name}')
    return value

def run_file(path, options):
    """Runs a config file with the options so far. Returns {name: value} of those that it changes. Raises UserError."""
    if not path.endswith('.py'):
        raise UserError(f'{path} is not a config file; use one of config/, the config.py of a run, or an option with '
                        f'two dashes (--dataset for a text; in sample.py, --out_dir for a run)')
    try:
        found = runpy.run_path(path, dict(options))         # the file's globals start as the options
    except Exception as e:          # any error in the file is the user's to fix, and so is a missing file
        where = path            # enough for a SyntaxError, whose text has the line
        for frame in inspect.getinnerframes(e.__traceback__):
            if frame.filename == path:
                where = f'{path}, line {frame.lineno}'
        raise UserError(f'{where}: {type(e).__name__}: {e}; correct the file, or its path')

    changed = {}
    for name, value in found.items():
        if name.startswith('_') or not name.islower() or inspect.ismodule(value) or callable(value):
            continue            # the file's own names
        value = check_value(value, name, options, path)
        if value != options[name]:          # the config.py of a run names every option, but did not set every one
            changed[name] = value
    return changed

# -----------------------------------------------------------------------------
# Comments of options, help

# options that people type from habit, and what to do here instead
FOREIGN = {
    'gradient_accumulation_steps': 'batch_size counts all sequences of an optimizer step here, so set batch_size to '
        "nanoGPT's batch_size * gradient_accumulation_steps, and micro_batch_size to nanoGPT's batch_size",
    'eval_iters': 'set eval_tokens to eval_iters * batch_size * block_size',
    'decay_lr': 'for a constant rate, set --min_lr to --learning_rate',
    'lr_decay_iters': 'the rate reaches min_lr at max_iters, so leave it out',
    'always_save_checkpoint': 'a checkpoint is saved after each evaluation, and the best is kept',
    'question': 'run `python bench.py` with these arguments',
}

def as_file(options):
    """Returns the text of a config file that sets these options."""
    return ''.join(f'{name} = {value!r}\n' for name, value in options.items())

def listing(space):
    """Returns the options of a script (between two dashed lines) or the fields of a class (up to a blank line)."""
    source = Path(inspect.getfile(space)).read_text('utf-8')
    first = f'class {space.__name__}:' if inspect.isclass(space) else '# -+'
    found = re.search(f'^{first}\n(.+?)\n(# -|\n)', source, re.M | re.S)
    return found[1] if found else ''

def comments_of(space):
    """Returns the comment of each option of a script, or of each field of a class, {name: text}."""
    found, name = defaultdict(str), ''
    for line in listing(space).splitlines():
        code, _, comment = line.partition('# ')
        if code.strip():            # otherwise, the line goes on with a comment
            name = code.split()[0].rstrip(':')
        found[name] += comment + ' '
    return found

def fields_of(dataclass):
    """Returns the fields of a class as Options."""
    return Options(dict(vars(dataclass)), comments=comments_of(dataclass))

def print_help(others):
    """Prints the script's docstring and all its options, as in the source."""
    script = sys.modules['__main__']
    print(inspect.getdoc(script))
    for space in [script, *others]:
        print(f'\n# {Path(inspect.getfile(space)).name}\n{listing(space)}')

# -----------------------------------------------------------------------------
# Errors and printed lines

class Diverged(UserError):
    """The loss or a weight became nan or inf."""
    status = 3
    kind = 'diverged'

class Output:
    """Wraps a stream so that a closed terminal, a broken pipe or a full disk is not an error."""
    def __init__(self, stream):
        self.stream = stream or open(os.devnull, 'w')       # None if it was closed: >&-

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()

    def flush(self):
        pass

# a disk that is full or read-only, a path that is taken or not allowed
PATH_ERRORS = 'ENOSPC EDQUOT EFBIG EACCES EROFS EEXIST EISDIR ENOTDIR ENAMETOOLONG'.split()

def launch(main):
    """Runs a script's main. Prints one line for mistakes, missing packages, Ctrl-C or a full disk; bugs raise."""
    try:
        main()
        return
    except BrokenPipeError:         # `| head` has read enough; not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except UserError as e:
        line, status = visible(' '.join(f'{e.kind}: {e}'.split())), e.status
    except ModuleNotFoundError as e:
        line, status = f'error: the package {e.name} is missing; run: pip install {e.name}', 2
    except KeyboardInterrupt:
        line, status = '\nstopped', 130
    except OSError as e:
        if errno.errorcode.get(e.errno) not in PATH_ERRORS:
            raise
        line, status = f'error: {e}; make room, check the path and its permissions, or use another folder', 2
    print(line, file=sys.stderr)
    sys.exit(status)

def visible(text):
    """Returns a text with its control characters as escapes, so that a file's name cannot change the terminal."""
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))

def count(n, noun):
    """count(1, 'file') -> '1 file', count(2000, 'file') -> '2,000 files'"""
    return f'{n:,} {noun}' + 's' * (n != 1)

def command(script, *arguments):
    """
    Returns a command to paste into bash, cmd.exe or PowerShell. Paths in arguments should have forward slashes.
    command('sample.py', '--out_dir=my run') -> 'python sample.py "--out_dir=my run"'
    """
    path = Path(__file__).with_name(script).as_posix().removeprefix(f'{Path.cwd().as_posix()}/')
    line = shlex.join(['python', path, *arguments])
    # All shells know double quotes, but read these characters in them in different ways. Such a line is for bash.
    return visible(line if re.search(r'["$`\\!]', line) else line.replace("'", '"'))

# -----------------------------------------------------------------------------
# Files

def read_json(path):
    """Returns the object in a JSON file, as a dict. Raises UserError."""
    try:
        return {**json.loads(Path(path).read_text('utf-8'))}
    except (OSError, ValueError, TypeError, RecursionError) as e:       # a TypeError for a list, say
        raise UserError(f'cannot read {path} ({e}); check the path, or make the file again')

def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

def remove(path):
    """Removes a file, a folder, or a link (but not what it names), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

def partial_path(path):
    """Returns the path under which a file or folder is written before it is renamed."""
    unfinished = path.with_name(f'.{path.name}.partial')
    remove(unfinished)          # left by a process that was killed, or a link to elsewhere
    return unfinished

def write(path, text):
    """Replaces a file's text atomically, so that readers see either the old text or the new one."""
    unfinished = partial_path(path)
    unfinished.write_bytes(text.encode(errors='backslashreplace'))          # a path may not be UTF-8
    unfinished.replace(path)

def write_json(path, content):
    write(path, json.dumps(content, indent=1))

def sync(path):
    """Waits until a file, or a folder's list of names, is on the disk."""
    with suppress(PermissionError):         # Windows cannot open a folder
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:            # An open file keeps Windows from removing its folder
            os.close(handle)

@contextmanager
def lock(path, wait=True):
    """
    Context in which this process holds a lock file. At its end, the file is gone, and so are empty folders around it.
    If another process holds it, waits or raises UserError. Only warns if files cannot be locked (in network folders).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        owner = f'another process works in {path.parent}; if none does, remove {path}'
        if not wait:
            raise UserError(f'{owner}, else use another --out_dir')
        print(f'waiting: {owner}', flush=True)
        held.acquire()
    except OSError as e:
        if errno.errorcode.get(e.errno) in PATH_ERRORS:
            raise
        print(f'{path} cannot be locked ({e}); make sure that no other process works in this folder', flush=True)
    try:
        yield
    finally:
        held.release()
        with suppress(OSError):         # for example, the folder is not empty
            remove(path)
            os.removedirs(path.parent)

@contextmanager
def new_folder(folder):
    """Yields a temporary folder. It is renamed to `folder` once its files are on disk, or removed on error."""
    unfinished = partial_path(folder)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in unfinished.iterdir():
            sync(path)
        sync(unfinished)
        if folder.is_symlink():
            remove(folder)
        os.rename(unfinished, folder)
        sync(folder.parent)
    finally:
        remove(unfinished)
