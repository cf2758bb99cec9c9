"""What is known about types that can't be pickled: why, and what to do instead. A table; decides nothing."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMPILED", "FSDP", "PICKLE_BUT_NO_MORE", "SCRIPT", "Kind", "kind_of"]


class Kind(NamedTuple):
    """Why instances of a type can't be pickled and what to do."""

    reason: str
    fix: str


_DROP = "drop it in __getstate__ and make it again in __setstate__ (nanscan.TransientState does both)"
_LOCK = Kind("a lock belongs to the threads of this process", _DROP)
_THREAD = Kind("a thread runs in this process only", "drop it in __getstate__ and start it again after loading")
_THREAD_DATA = Kind("thread-local data belongs to the threads of this process", _DROP)
_QUEUE = Kind(
    "a queue holds locks of this process",
    "drop it in __getstate__; between processes use multiprocessing.Queue and pass it as an argument of Process",
)
_SHARED = Kind(
    "it may only pass to another process while that one is started (inheritance)",
    "pass it as an argument of Process or to the pool's initializer; drop it in __getstate__ for saving",
)
_HANDLE = Kind(
    "only the number of its handle would be saved, which means nothing in another process and belongs to two owners in "
    "this one",
    "pass it as an argument of Process; drop it in __getstate__ for saving",
)
_POOL = Kind("a pool of workers lives in this process", "drop it in __getstate__ and make it where it is used")
_FUTURE = Kind("it waits for a pool of workers in this process", "keep its result: x.result(), or x.get()")
_FILE = Kind(
    "an open file is a handle of this process",
    "keep the path (and position) and open the file lazily; drop the handle in __getstate__ (nanscan.TransientState)",
)
_SOCKET = Kind(
    "a connection is a handle of this process", "keep the address and connect lazily; drop it in __getstate__"
)
_RUNNING = Kind(
    "its position in running code can't be saved",
    "keep what it is made from (a list, or a class with __iter__ and a position) and make it again after loading",
)
_ASYNC = Kind("it belongs to the event loop that runs in this process", _DROP)
_PROCESS = Kind("it is the handle of a running process", "drop it in __getstate__; keep its command line if needed")
_MODULE = Kind("a module can't be pickled", "import it where it is used instead of keeping it as an attribute")
_WEAK = Kind(
    "a weak reference means an object of this process",
    "drop it in __getstate__ and set it again after loading, or keep a strong reference or a name",
)
_VIEW = Kind("a view of another object can't be pickled", "make a copy of it: list(…), dict(…) or bytes(…)")
_CODE = Kind("running or compiled Python code can't be pickled", "keep the source text, or a function's name")
_HANDLER = Kind(
    "a logging handler holds a lock and a stream",
    "keep the logger instead (logging.getLogger(name) pickles by its name), or drop the handler in __getstate__",
)
_WRITER = Kind(
    "a writer holds threads, queues and open files",
    "keep its log_dir and open it again after loading; drop it in __getstate__ (nanscan.TransientState)",
)
_STREAM = Kind("it is a handle of the device in this process", "make it lazily on the device; drop it in __getstate__")
_GROUP = Kind(
    "a process group or store connects the ranks of this run",
    "drop it in __getstate__ and take torch.distributed's default group again after loading",
)
SCRIPT = Kind("a compiled TorchScript object does not go through pickle", "torch.jit.save it, or save its state_dict()")
_NATIVE = Kind("it is an object of PyTorch's C++ side without pickling", _DROP)
_PADDLE_OPTIMIZER = Kind(
    "a Paddle optimizer holds functions and programs of this process",
    "save optimizer.state_dict() (nanscan.save(…, 'model.pdopt') or paddle.save) and give it to set_state_dict() of an "
    "optimizer that the program makes anew",
)
_PADDLE_LOADER = Kind(
    "a Paddle DataLoader holds the places (devices) of this process", "keep its dataset and make the loader anew"
)
_PADDLE_NATIVE = Kind("it is an object of Paddle's C++ side without pickling", _DROP)
_DESCRIPTOR = Kind("a descriptor belongs to its class", "keep the value, or the attribute's name")
_MATCH = Kind("a match refers to the text it was found in", "keep match.groups(), match.span() or match.groupdict()")
_POINTER = Kind("it points into this process's memory", "keep the data (bytes(…), an array) instead of the pointer")
_SQL = Kind("a database connection is a handle of this process", "keep the file's name and connect lazily")
_TEMPORARY = Kind(
    "a temporary file or folder is removed by the process that made it", "keep its path, or drop it in __getstate__"
)
_DDP = Kind(
    "it needs the process group, here and where it is loaded",
    "save model.module.state_dict(): the inner model's, whose keys have no 'module.' in front",
)
FSDP = Kind(
    "a model under fully_shard holds one rank's shards, process groups and hooks of this run",
    "nanscan.CheckpointManager saves it on all ranks; for one file take the state of "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True",
)
COMPILED = Kind(
    "a compiled model holds what torch.compile made in this process",
    "save model._orig_mod.state_dict(): the inner model's, whose keys have no '_orig_mod.' in front",
)
_PROXY = Kind(
    "only the address of a manager's server process would be saved: it loads in no later run",
    "keep a copy of what it holds: dict(x), list(x), x.value; to another process pass it as an argument of Process",
)
_PROGRAM = Kind("an exported program pickles and does not load", "torch.export.save(x, path)")
_BAR = Kind(
    "a console or progress display holds a stream and locks of this process",
    "drop it in __getstate__ and make it where the loop runs; keep its count if it is needed",
)
_PARSER = Kind("a parser holds functions of this process", "keep the arguments that it read: vars(args)")
_OPERATOR = Kind(
    "an operator of torch.ops is registered anew in each process",
    "keep its name as a str, or call it from a named function at the top of a module; a module's method finds it there",
)
_LOGGER = Kind(
    "a logger is saved by its name, and under this name logging finds another one",
    "take it from logging.getLogger(name) instead of making it, and it pickles; or drop it in __getstate__",
)
_LOGURU = Kind("it holds the open streams of this process", "import it where it is used: from loguru import logger")
_MANAGER = Kind(
    "a checkpoint manager holds a thread and locks of this process",
    "keep its directory, and make the manager in the process that saves; keep it beside the model, not in it",
)
_CONTEXT = Kind("it belongs to the context that runs now", _DROP)

_FAMILIES: tuple[tuple[Kind, str], ...] = (
    (_LOCK, "_thread.lock _thread.RLock threading.Condition threading.Event threading.Semaphore threading.Barrier"),
    (_LOCK, "threading._RLock multiprocessing.managers.AcquirerProxy filelock.BaseFileLock"),
    (_THREAD, "threading.Thread _thread._ThreadHandle"),
    (_THREAD_DATA, "_thread._local"),
    (_QUEUE, "queue.Queue _queue.SimpleQueue queue._PySimpleQueue"),
    (_SHARED, "multiprocessing.queues.Queue multiprocessing.queues.SimpleQueue multiprocessing.synchronize.SemLock"),
    (_SHARED, "multiprocessing.synchronize.Condition multiprocessing.synchronize.Event multiprocessing.heap.Arena"),
    (_SHARED, "multiprocessing.synchronize.Barrier multiprocessing.sharedctypes.SynchronizedBase"),
    (_HANDLE, "multiprocessing.connection._ConnectionBase"),
    (_SHARED, "multiprocessing.connection.Listener"),
    (_POOL, "concurrent.futures._base.Executor multiprocessing.pool.Pool multiprocessing.managers.BaseManager"),
    (_FUTURE, "concurrent.futures._base.Future multiprocessing.pool.ApplyResult"),
    (_PROXY, "multiprocessing.managers.BaseProxy"),
    (
        _FILE,
        "_io._IOBase _io.FileIO _io.TextIOWrapper _io.BufferedReader _io.BufferedWriter _io.BufferedRandom mmap.mmap",
    ),
    (_FILE, "zipfile.ZipFile tarfile.TarFile posix.ScandirIterator posix.DirEntry h5py._hl.files.File"),
    (_TEMPORARY, "tempfile._TemporaryFileWrapper tempfile.SpooledTemporaryFile tempfile.TemporaryDirectory"),
    (_SOCKET, "_socket.socket _ssl._SSLContext _ssl._SSLSocket select.epoll select.poll selectors.BaseSelector"),
    (_SOCKET, "http.client.HTTPConnection smtplib.SMTP ftplib.FTP"),
    (_SQL, "sqlite3.Connection sqlite3.Cursor"),
    (_PROCESS, "subprocess.Popen multiprocessing.process.BaseProcess"),
    (_RUNNING, "generator coroutine async_generator coroutine_wrapper"),
    (_RUNNING, "collections.abc.Iterator _csv.reader _csv.writer contextlib.ExitStack"),
    (_RUNNING, "torch.utils.data.dataloader._BaseDataLoaderIter re.Scanner callable_iterator"),
    (_ASYNC, "_asyncio.Future _asyncio.Task asyncio.locks.Lock asyncio.locks.Event asyncio.locks.Condition"),
    (_ASYNC, "asyncio.locks.Semaphore asyncio.queues.Queue asyncio.events.AbstractEventLoop"),
    (_MODULE, "module"),
    (_WEAK, "weakref.ReferenceType weakref.ProxyType weakref.CallableProxyType weakref weakproxy weakcallableproxy"),
    (_WEAK, "weakref.WeakKeyDictionary weakref.WeakValueDictionary _weakrefset.WeakSet"),
    (_WEAK, "weakref.WeakMethod weakref.finalize torch.utils.weak.WeakIdKeyDictionary"),
    (_WEAK, "torch.utils.weak.WeakIdRef torch.multiprocessing.reductions.StorageWeakRef"),
    (_VIEW, "mappingproxy dict_keys dict_values dict_items memoryview odict_keys odict_values odict_items"),
    (_CODE, "code frame traceback cell"),
    (_DESCRIPTOR, "property classmethod staticmethod functools.cached_property getset_descriptor member_descriptor"),
    (_DESCRIPTOR, "functools.singledispatchmethod"),
    (_CONTEXT, "_contextvars.ContextVar _contextvars.Context _contextvars.Token"),
    (_MATCH, "re.Match"),
    (
        _POINTER,
        "_ctypes._Pointer _ctypes.CFuncPtr _ctypes.Structure _ctypes.Union _ctypes.Array _ctypes._SimpleCData "
        "ctypes.CDLL PyCapsule",
    ),
    (_OPERATOR, "torch._ops.OperatorBase torch._ops.OpOverloadPacket torch._library.custom_ops.CustomOpDef"),
    (_LOGGER, "logging.Logger"),
    (_LOGURU, "loguru._logger.Logger"),
    (_MANAGER, "nanscan.manager.manager.CheckpointManager"),
    (_HANDLER, "logging.Handler logging.handlers.QueueListener"),
    (_WRITER, "torch.utils.tensorboard.writer.SummaryWriter torch.utils.tensorboard.writer.FileWriter"),
    (_WRITER, "tensorboard.summary.writer.event_file_writer.EventFileWriter tensorboardX.writer.SummaryWriter"),
    (_STREAM, "torch.Stream torch.Event torch._C._CudaStreamBase torch._C._CudaEventBase"),
    (
        _STREAM,
        "torch._C._CUDAGraph torch.cuda.graphs.CUDAGraph "
        "torch.cuda.streams.Stream torch.cuda.streams.Event torch.cuda.streams.ExternalStream",
    ),
    (_GROUP, "torch.distributed.distributed_c10d.ProcessGroup torch.distributed.distributed_c10d.Store"),
    (_GROUP, "torch.distributed.distributed_c10d.Work torch._C._distributed_c10d.Backend"),
    (_GROUP, "torch._C._distributed_c10d.Reducer torch._C._distributed_c10d.Logger"),
    (SCRIPT, "torch.jit._script.ScriptModule torch.jit.torch.jit.ScriptFunction torch.ScriptObject torch.Graph"),
    (SCRIPT, "torch.ScriptModule torch.ScriptMethod torch.jit.CompilationUnit torch.Node torch.Value torch.Block"),
    (_DDP, "torch.nn.parallel.distributed.DistributedDataParallel"),
    (FSDP, "torch.distributed.fsdp.FSDPModule"),
    (COMPILED, "torch._dynamo.eval_frame.OptimizedModule"),
    (_PADDLE_OPTIMIZER, "paddle.optimizer.optimizer.Optimizer"),
    (_PADDLE_LOADER, "paddle.io.reader.DataLoader"),
    (_RUNNING, "paddle.io.dataloader.dataloader_iter._DataLoaderIterBase"),
    (_PROGRAM, "torch.export.exported_program.ExportedProgram"),
    (_BAR, "tqdm.std.tqdm rich.progress.Progress rich.live.Live rich.status.Status rich.console.Console"),
    (_PARSER, "argparse.ArgumentParser"),
    (_NATIVE, "torch.autograd.graph.Node torch.utils.hooks.BackwardHook"),
)
PICKLE_BUT_NO_MORE = frozenset({_HANDLE, _PROXY, _PROGRAM})
"""Kinds whose instances pickle, and whose pickles are worth nothing."""
_TABLE = {name: kind for kind, names in _FAMILIES for name in names.split()}


def kind_of(cls: type) -> Kind | None:
    """What is known about instances of `cls`, through the nearest base class that the table has.

    >>> import threading
    >>> kind_of(threading.Event).reason
    'a lock belongs to the threads of this process'
    """
    for base in cls.__mro__:
        name = base.__qualname__ if base.__module__ == "builtins" else f"{base.__module__}.{base.__qualname__}"
        if name in _TABLE:
            return _TABLE[name]
    if str(cls.__module__).startswith("paddle.base.libpaddle"):
        return _PADDLE_NATIVE
    return _NATIVE if str(cls.__module__).startswith("torch._C") else None
