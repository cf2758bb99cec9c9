"""Which names a pickle may import: what torch's weights-only loader allows, and what would run code when loaded."""

from __future__ import annotations

import _compat_pickle
import sys
import types
from typing import Any

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

__all__ = ["allowed", "allowed_objects", "never_allowed", "pickle3_name", "python3_name", "resolve", "runs_code"]

_loader: Any = torch._weights_only_unpickler


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whole packages whose functions act on the system, and single names of modules that also hold harmless ones. The
# reduce protocol calls any of them with any arguments, so that importing one is as good as a program.
_CODE_MODULES = _words(
    """
    os posix nt subprocess _posixsubprocess pty shutil socket _socket ctypes _ctypes runpy code codeop commands
    importlib _frozen_importlib _frozen_importlib_external imp pkgutil zipimport timeit cProfile profile pdb bdb
    trace webbrowser ftplib smtplib telnetlib urllib http xmlrpc asyncio multiprocessing threading _thread
    concurrent signal sys gc inspect tempfile glob fileinput pip setuptools distutils ensurepip venv idlelib
    doctest unittest pickle _pickle cPickle dill cloudpickle joblib marshal shelve nturl2path platform sysconfig
    linecache antigravity _osx_support _aix_support torch.hub torch.utils.cpp_extension torch._inductor
    numpy.testing numpy.f2py
    """
)
_CODE_NAMES = _words(
    """
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.open builtins.getattr
    builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.vars builtins.input
    builtins.breakpoint builtins.map builtins.filter builtins.exit builtins.quit builtins.__build_class__
    builtins.memoryview builtins.help io.open _io.open io.FileIO _io.FileIO io.open_code _io.open_code
    types.FunctionType types.CodeType types.MethodType types.LambdaType operator.attrgetter
    operator.methodcaller operator.call _operator.attrgetter _operator.methodcaller _operator.call
    functools.reduce _functools.reduce itertools.starmap torch.load torch.serialization.load
    torch.storage._load_from_bytes torch.jit.load torch.classes.load_library torch.ops.load_library numpy.load
    numpy.fromfile numpy.memmap numpy.save pandas.read_pickle pandas.io.pickle.read_pickle logging.config.listen
    logging.FileHandler site.main uuid._popen bz2.open gzip.open lzma.open pathlib.Path.write_text
    pathlib.Path.unlink
    """
)
# Classes and constants of those packages that ordinary objects hold, and whose call does nothing to the system.
_HARMLESS = _words(
    """
    os.stat_result os.terminal_size signal.Signals signal.Handlers multiprocessing.AuthenticationString
    threading.local http.HTTPStatus inspect.Parameter inspect.Signature
    urllib.parse.ParseResult urllib.parse.SplitResult ctypes.c_int ctypes.c_long ctypes.c_float ctypes.c_double
    pathlib.PosixPath
    """
)


def python3_name(module: str, name: str) -> tuple[str, str]:
    """The names of today for a global as a protocol 0–2 pickle spells it (Python 2's), as torch's loader does it.

    >>> python3_name("__builtin__", "xrange")
    ('builtins', 'range')
    """
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    else:
        module = IMPORT_MAPPING.get(module, module)
    return module, name


def pickle3_name(module: str, name: str) -> tuple[str, str]:
    """The same, as `pickle` itself does it, which knows more names.

    >>> pickle3_name("commands", "getoutput"), pickle3_name("exceptions", "ValueError")
    (('subprocess', 'getoutput'), ('builtins', 'ValueError'))
    """
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def allowed(path: str) -> bool:
    """True if torch.load(weights_only=True) of the installed torch imports this global, now.

    What the program itself added by `torch.serialization.add_safe_globals` counts.

    >>> allowed("collections.OrderedDict"), allowed("argparse.Namespace")
    (True, False)
    """
    if path.partition(".")[0] in _loader._blocklisted_modules and path.count(".") == 1:
        return False
    return path in _loader._get_allowed_globals() or path in _loader._get_user_allowed_globals()


def allowed_objects() -> list[Any]:
    """The objects themselves: what the loader may call, create and give a state to."""
    return [
        *_loader._get_allowed_globals().values(),
        *_loader._get_user_allowed_globals().values(),
    ]


def never_allowed(path: str) -> bool:
    """True where no allowlist helps, or none should be advised: blocked modules, and names that run code."""
    module = path.rpartition(".")[0]
    return module in _loader._blocklisted_modules or runs_code(module, path[len(module) + 1 :]) is not None


def runs_code(module: str, name: str) -> str | None:
    """Why importing and calling this global is as good as running a program, or None.

    A list can never be complete: None is no promise that a file is harmless. Only `weights_only=True`, which allows
    what is known instead of refusing what is known, is one.

    Args:
        module, name: as in the pickle, in today's spelling.

    >>> runs_code("os", "system")
    'os.system acts on the system'
    >>> runs_code("builtins", "eval")
    'builtins.eval runs or reaches any code'
    >>> runs_code("collections", "OrderedDict")
    """
    path = f"{module}.{name}"
    if path in _HARMLESS:
        return None
    known = _known(module, name) or _known(*_own_name(module, name))
    if known:
        return f"{path} {known}"
    return _reached(path, name) if "." in name else None


def _known(module: str, name: str) -> str | None:
    path = f"{module}.{name}"
    if path in _HARMLESS:
        return None
    if path in _CODE_NAMES or any(path.startswith(listed + ".") for listed in _CODE_NAMES):
        return "runs or reaches any code"
    parts = module.split(".")
    if any(".".join(parts[:count]) in _CODE_MODULES for count in range(1, len(parts) + 1)):
        return "acts on the system"
    return None


def _own_name(module: str, name: str) -> tuple[str, str]:
    """Where the object comes from, if that module is imported already: many modules hand on what they import."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType)):
        return str(found.__module__), str(found.__qualname__)
    return (found.__name__, "") if isinstance(found, types.ModuleType) else (module, name)


def _reached(path: str, name: str) -> str | None:
    """A dotted name goes through attributes, and by way of a module's imports anywhere."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in _CODE_MODULES or _known("builtins", part):
            return f"{path} reaches {'.'.join(parts[index:])}"
        if part.startswith("__"):
            return f"{path} reaches into the interpreter"
    return None


def resolve(path: str) -> Any:
    """The object of a dotted path among the modules that are already imported; None if there is none."""
    module, _, name = path.rpartition(".")
    found = _attribute(path)
    if found is None:  # a name of Python 2 that torch's loader leaves as it is: exceptions.ValueError
        found = _attribute(".".join(pickle3_name(module, name)))
    return found


def _attribute(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        if found is None:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found
    return None
