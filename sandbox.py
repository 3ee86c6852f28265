"""sandbox: runs Python that a model wrote, on this machine, many calls at once.

    LocalSandbox -> zygote -> supervisors -> user code and whatever it starts

The zygote imports numpy and sympy once and forks the rest; it is a fresh interpreter, so nothing of the
caller's memory is in it. There is a supervisor for every call that runs at once. It forks a process for each
call, or keeps one for a session, and watches it from outside: its time, its output, its end.

On Linux the zygote gives up the network and may write to no file; a call further gets its own process ids,
/proc, /tmp and user. Our processes end when the socket to their parent closes, so that nothing outlives the
caller. The zygote runs this very file. It needs nothing but the standard library; Math-Verify for kind check.
"""

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import linecache
import math
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class ToolStatus(StrEnum):
    """How a tool call ended. Every status but ok is a failed call."""

    ok = "ok"
    error = "error"  # the code raised, or exited with another status than 0
    timeout = "timeout"
    memory = "memory"
    output_limit = "output_limit"  # killed for flooding; output merely cut for the model is ok
    parse_error = "parse_error"  # the model's call was malformed: nothing ran


@dataclass(frozen=True)
class ToolRequest:
    """One execution asked of a sandbox."""

    code: str  # source; for kind check the model's answer
    stdin: str = ""  # standard input; for kind check the right answer
    kind: str = "python"  # python (fresh state), jupyter (the state of its session) or check (Math-Verify)
    session: str | None = None  # names the state of kind jupyter


@dataclass(frozen=True)
class ToolResult:
    """What an execution gave. `seconds` is wall time."""

    status: ToolStatus
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


class SandboxUnavailable(RuntimeError):
    """The execution infrastructure is lost; never raised for what user code did."""


def run_code(code: str, namespace: dict, name: str = "<code>") -> str:
    """Run one cell as a notebook would: print the value of a last expression, or a short traceback.

    `name` starts with "<code" and is the file that tracebacks name; they show the frames of such files only.
    Returns "ok", "error" or "memory" (values of ToolStatus).
    """
    reserve = bytearray(1 << 20)  # given back to have room in which to report a MemoryError
    try:
        linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if last:
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
            if value is not None:
                print(repr(value))
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        return "error" if stop.code else "ok"
    except BaseException as error:  # whatever the code raises is its result
        del reserve
        report = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in report.stack if frame.filename.startswith("<code")]
        report.stack = traceback.StackSummary.from_list(frames)
        print(*report.format(chain=False), sep="", end="", file=sys.stderr)
        return "memory" if isinstance(error, MemoryError) else "error"
    return "ok"


def check_answer(answer: str, gold: str) -> bool:
    """Math-Verify's verdict. Boxed, LaTeX and plain forms both parse, and no number is picked from a text."""
    from math_verify import parse, verify

    boxed = [f"\\boxed{{{text.replace('**', '^')}}}" for text in (gold, answer)]
    return verify(*map(parse, boxed))


LIBC = ctypes.CDLL(None, use_errno=True)


def libc(name: str, *args) -> None:
    """Call a C function that Python does not offer. Raises OSError if it fails."""
    if getattr(LIBC, name)(*(arg.encode() if isinstance(arg, str) else arg for arg in args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def isolate(hidden: set[str], keep: list[str], root: bool) -> None:
    """Linux: leave the network, make every file read-only, hide folders but for those of `keep` in them.

    Our next child will be process 1 of a new pid namespace: when it ends, so does all that it started.
    """
    maps = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    libc("unshare", 0x64020000 | (0 if root else 0x10000000))  # NEWNET, NEWPID, NEWUTS, NEWNS | NEWUSER
    for name, text in () if root else maps.items():
        Path("/proc/self", name).write_text(text)
    libc("mount", "none", "/", None, 0x44000, None)  # MS_REC | MS_PRIVATE: the host sees none of what follows
    for folder in filter(os.path.isdir, sorted(hidden)):
        kept = {path: os.open(path, os.O_PATH) for path in keep if path.startswith(folder + "/")}
        libc("mount", "tmpfs", folder, "tmpfs", 6, "mode=755")  # MS_NOSUID | MS_NODEV
        for path, fd in kept.items():
            os.makedirs(path, exist_ok=True)
            libc("mount", f"/proc/self/fd/{fd}", path, None, 0x5000, None)  # MS_BIND | MS_REC
            os.close(fd)
    attributes = (ctypes.c_uint64 * 4)(1)  # struct mount_attr: set MOUNT_ATTR_RDONLY
    libc("syscall", 442, -100, b"/", 0x8000, attributes, 32)  # mount_setattr(..., AT_RECURSIVE, ...)


def confine(spec: dict, work: str) -> None:
    """Give this process, which will run user code, its own file system, user and limits. Raises OSError."""
    os.setsid()
    limits = {"FSIZE": spec["memory"], "NOFILE": 256, "CORE": 0}
    if spec["linux"]:
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits["AS"] = own + spec["memory"]
    if spec["isolate"]:
        libc("unshare", 0x08020000)  # NEWIPC | NEWNS
        libc("mount", "tmpfs", work, "tmpfs", 6, f"size={spec['memory']},nr_inodes=10000,mode=1777")
        for folder in spec["scratch"][1:]:
            libc("mount", work, folder, None, 0x1000, None)  # MS_BIND
        libc("mount", "proc", "/proc", "proc", 15, None)  # read-only, nosuid, nodev, noexec
    if spec["isolate"] or spec["root"]:  # else the user's other processes would count
        limits["NPROC"] = spec["processes"]
    if spec["root"]:
        uid = (1 << 30) + secrets.randbelow(1 << 30)  # one for each call, as NPROC counts by user
        os.chown(work, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)  # takes all capabilities
    elif spec["isolate"]:
        libc("unshare", 0x10000000)  # NEWUSER: NPROC counts by user namespace, too
        libc("capset", (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())
    if spec["linux"]:
        libc("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, last: a change of user undoes it
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.chdir(work)
    os.environ.update(HOME=work, TMPDIR=work)


def child(spec: dict, work: str, link: int, out: int, err: int) -> None:
    """Life of a process for user code: one request comes over `link`, or a session's one after another."""
    confine(spec, work)
    for fd, source in enumerate((out, err, link), 1):
        os.dup2(source, fd)
    os.closerange(4, 1 << 20)
    os.write(3, b"+")
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all calls would draw the same numbers
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path.insert(0, "")
    sys.stdout.reconfigure(line_buffering=True)  # a call that is killed keeps what it printed
    for count, line in enumerate(os.fdopen(3, "rb", closefd=False), 1):
        kind, code, stdin = json.loads(line)
        with tempfile.TemporaryFile() as file:  # not a pipe, which one would have to feed
            file.write(stdin.encode("utf-8", "surrogatepass"))
            file.seek(0)
            os.dup2(file.fileno(), 0)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        if kind == "check":
            code, main.check, main.answer, main.gold = "check(answer, gold)", check_answer, code, stdin
        if kind != "jupyter":
            os.close(3)
            resource.setrlimit(resource.RLIMIT_CPU, (spec["cpu"], spec["cpu"]))
        status = run_code(code, main.__dict__, "<code>" if count == 1 else f"<code {count}>")
        if kind != "jupyter":
            threading._shutdown()  # os._exit would neither wait for threads ...
            atexit._run_exitfuncs()  # ... nor call these
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have closed or replaced it
                stream.flush()
        mark = ("ok", "error", "memory").index(status)
        if kind != "jupyter":
            os._exit(mark)
        os.write(3, b"%d" % mark)


def watch(spec: dict, parent: socket.socket, line: bytes, pid: int, link: socket.socket, pipes) -> list:
    """Have a process run one request. Returns [status, stdout, stderr, seconds, whether it lives on]."""
    link.sendall(line)
    start, status, alive, output = time.monotonic(), None, False, dict.fromkeys(pipes, b"")
    names = {0: "ok", 2: "memory", -signal.SIGKILL: "memory", -signal.SIGXCPU: "timeout"}  # by the kernel
    ends = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
    watched = {parent, link, *pipes, *ends}
    while status is None:
        left = max(0, start + spec["timeout"] - time.monotonic())
        done, code, _ = os.wait4(pid, os.WNOHANG)  # before reading, so that all it wrote is seen
        ready = select.select(watched, [], [], 0 if done else left if ends else min(left, 0.02))[0]
        for source in watched.intersection(ready).difference(ends):
            data = os.read(source if source in output else source.fileno(), 1 << 16)
            if source is parent:
                raise EOFError("the parent has died or given up")
            if not data:
                watched.remove(source)
            elif source is link:
                status, alive = names.get(data[-1] - ord("0"), "error"), data != b"2"
            else:
                output[source] += data
        if done:
            status = names.get(os.waitstatus_to_exitcode(code), "error")
        elif status is None and not left:
            status = "timeout"
        if sum(map(len, output.values())) > spec["output"]:
            status, alive = "output_limit", False
    seconds = time.monotonic() - start
    for fd in ends:
        os.close(fd)
    if not alive:
        bury(pid)
    for pipe in pipes:
        with contextlib.suppress(BlockingIOError):
            while len(output[pipe]) <= spec["output"] and (data := os.read(pipe, 1 << 16)):
                output[pipe] += data
    if sum(map(len, output.values())) > spec["output"] and status != "timeout":
        status, alive = "output_limit", False
    texts = (text[: spec["output"]].decode("utf-8", "replace") for text in output.values())
    return [status, *texts, seconds, alive]


def bury(pid: int) -> None:
    """Kill a call's process and what it left: its group and, where Linux makes orphans ours, those."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    children = Path("/proc/thread-self/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            for orphan in children.read_text().split() if children.exists() else ():
                os.kill(int(orphan), signal.SIGKILL)
            os.wait()


@contextlib.contextmanager
def spawn(spec: dict) -> Iterator[tuple[int, socket.socket, tuple[int, int]]]:
    """A process for user code: its id, our ends of its link, and of its stdout and stderr. Leaves nothing."""
    (link, theirs), (out, their_out), (err, their_err) = socket.socketpair(), os.pipe(), os.pipe()
    work = spec["scratch"][0] if spec["isolate"] else tempfile.mkdtemp(prefix="minirstar-")
    if spec["isolate"]:
        libc("setns", spec["pid_namespace"], 0)  # ours again: the last child was given another
        libc("unshare", 0x20000000)  # NEWPID: our child is process 1 of a new one, and the others die with it
    pid = os.fork()
    if pid == 0:
        child(spec, work, theirs.fileno(), their_out, their_err)
    for fd in (theirs.detach(), their_out, their_err):
        os.close(fd)
    try:
        if link.recv(1) != b"+":
            raise OSError("a process for user code could not be confined")
        link.settimeout(spec["timeout"])  # of sending: a session's process may be too busy to read
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        yield pid, link, (out, err)
    finally:
        bury(pid)
        for fd in (link.detach(), out, err):
            os.close(fd)
        if not spec["isolate"]:
            shutil.rmtree(work, ignore_errors=True)


def supervise(spec: dict, parent: socket.socket) -> None:
    """Run the requests from `parent`, each in a new process unless its session has one, until it closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if spec["isolate"]:
        spec["pid_namespace"] = os.open("/proc/self/ns/pid", os.O_RDONLY)
    elif spec["linux"]:
        libc("prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours
    requests = parent.makefile("rb")
    while line := requests.readline():
        with spawn(spec) as process:
            while line and (reply := watch(spec, parent, line, *process))[-1]:
                parent.sendall(json.dumps(reply).encode() + b"\n")
                line = requests.readline()
        if line:  # answered only now that all of its processes have ended
            parent.sendall(json.dumps(reply).encode() + b"\n")


def zygote(spec: dict) -> None:
    """Import what calls need, once, and fork a supervisor for each socket that the control socket brings."""
    keep = sorted({sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}, key=len)
    closed = [str(parent) for path in keep for parent in Path(path).parents if not parent.stat().st_mode & 1]
    spec["linux"] = sys.platform == "linux"
    spec["root"] = os.getuid() == 0 and (spec["isolate"] or not closed)  # then each call gets its own user
    spec["scratch"] = [f for f in ("/tmp", "/dev/shm") if not any(path.startswith(f + "/") for path in keep)]
    control = socket.socket(fileno=spec["control"])
    if spec["linux"]:
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory: rather us than the caller
    if spec["isolate"]:
        public = {"/tmp", "/dev/shm"} - {*spec["scratch"]}  # they hold Python, so calls cannot cover them
        isolate({spec["home"], "/run", *public, *closed} - {"/"}, keep, spec["root"])
        if os.fork():
            control.close()
            os._exit(bool(os.wait()[1]))
        libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        libc("mount", "proc", "/proc", "proc", 14, None)  # of our new namespace; nosuid, nodev, noexec
    for name in spec["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "math_verify" in sys.modules:
        check_answer("\\frac{1}{2}", "0.5")  # the first takes 80 ms longer
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, the pages that children share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need no burial
    while (received := socket.recv_fds(control, 1, 1))[0]:
        if os.fork() == 0:
            try:
                control.close()
                supervise(spec, socket.socket(fileno=received[1][0]))
                os._exit(0)
            except BaseException:  # into the log, from which the caller quotes
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        os.close(received[1][0])
    with contextlib.suppress(ChildProcessError):
        os.wait()  # until the last supervisor has ended


@dataclass
class Session:
    """State of kind jupyter: the supervisor of its process, whether that lives, the cells that made it."""

    supervisor: socket.socket | None = None
    alive: bool = False
    history: list[ToolRequest] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class LocalSandbox:
    """Runs requests on this machine: Python, sessions of Python, checks of answers. Usable from any thread.

    Args: `workers` calls run at once (None: two per core). Each has `timeout` seconds of wall time,
    `memory_mb` for each of its processes beyond the interpreter's own, `output_bytes` of stdout and stderr
    together, and `processes` processes and threads. Modules in `preload` are imported beforehand, where they
    are installed; the default names what numpy and sympy would only import at first use. Raises ValueError
    for a value out of range.

    On Linux a call has no network, writes to nothing but its own /tmp (`memory_mb` large), sees neither other
    processes nor the home folder, and ends with all that it started. Where that is refused (locked-down
    containers, macOS) there are only the limits, without `processes` unless root, and kills; a warning says
    so.

    Not covered: reading other files that anyone (or you, if not root) may read; the memory of a call's
    processes taken together; shares of the CPU; what a session does between calls; what calls say to one
    another through abstract sockets; flaws in the kernel. For that there is scale/sandbox.
    """

    def __init__(self, workers: int | None = None, timeout: float = 4.0, memory_mb: int = 512,
                 output_bytes: int = 1 << 20, processes: int = 64,
                 preload: Sequence[str] = ("numpy.random", "sympy.tensor.tensor", "sympy.sets.setexpr"),
                 isolate: bool = True):
        workers = 2 * (os.cpu_count() or 1) if workers is None else workers
        for name, value, low, high in (
            ("workers", workers, 1, 1024), ("timeout", timeout, 0.05, 3600),
            ("memory_mb", memory_mb, 16, 1 << 20), ("output_bytes", output_bytes, 1024, 1 << 30),
            ("processes", processes, 1, 1 << 15),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value!r}: must be from {low} to {high}")
        cpu = math.ceil(timeout * (os.cpu_count() or 1)) + 1  # seconds; only acts where a supervisor is lost
        self.spec = {"timeout": timeout, "memory": int(memory_mb) << 20, "cpu": cpu, "output": output_bytes,
                     "processes": processes, "preload": list(preload), "isolate": isolate,
                     "home": os.path.expanduser("~")}
        self.pool, self.lock = ThreadPoolExecutor(workers, "sandbox"), threading.RLock()
        self.sessions: dict[str, Session] = {}
        self.idle: list[socket.socket] = []  # supervisors without a call
        self.zygote: subprocess.Popen | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  what our own processes say when they fail

    def __enter__(self) -> "LocalSandbox":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def run(self, requests: Sequence[ToolRequest]) -> list[ToolResult]:
        """Run requests at once, those of one session one after another. Returns results in their order.

        Raises ValueError for an unknown kind or a jupyter request without session, SandboxUnavailable where
        our own processes are lost and cannot be replaced; never for what the code did.
        """
        queues, results = defaultdict(list), {}
        for i, request in enumerate(requests):
            jupyter = request.kind == "jupyter"
            if request.kind not in ("python", "jupyter", "check") or jupyter and not request.session:
                raise ValueError(f"kind is {request.kind!r} and session {request.session!r}: must be python, "
                                 "check, or jupyter with the name of a session")
            if request.kind == "check" and importlib.util.find_spec("math_verify") is None:
                raise SandboxUnavailable("kind check needs Math-Verify: pip install math-verify")
            queues[request.session if jupyter else i].append(i)
        if self.log.closed:
            raise SandboxUnavailable("this sandbox is closed")

        def work(queue: list[int]) -> None:
            for i in queue:
                results[i] = self._answer(requests[i])

        list(self.pool.map(work, queues.values()))
        return [results[i] for i in range(len(requests))]

    def close(self, session: str | None = None) -> None:
        """End one session, or everything. Waits for calls that run."""
        if session is None:
            self.pool.shutdown()
        for name in list(self.sessions) if session is None else [session]:
            ended = self.sessions.pop(name, Session())
            with ended.lock:
                if ended.supervisor:
                    ended.supervisor.close()
        if session is None:
            while self.idle:
                self.idle.pop().close()
            self._stop()
            self.log.close()

    def _answer(self, request: ToolRequest) -> ToolResult:
        """Run one request; where our processes are lost, again, in the state that its session had."""
        jupyter = request.kind == "jupyter"
        with self.lock:
            session = Session(self.idle.pop() if self.idle and not jupyter else None)
            session = self.sessions.setdefault(request.session, session) if jupyter else session
        with session.lock:
            for _ in range(5):
                cells = [request] if session.alive else [*session.history, request]
                session.supervisor = session.supervisor or self._connect()
                for left in reversed(range(len(cells))):
                    reply = self._ask(session.supervisor, cells[-1 - left])
                    session.alive = bool(reply and reply.pop())
                    if not session.alive:
                        break
                if reply is None:
                    session.supervisor.close()
                    session.supervisor = None
                elif left:
                    session.history.remove(cells[-1 - left])  # it ended once, but not again: go on without it
                else:
                    session.history += [request] if session.alive else []
                    self.idle += [] if jupyter else [session.supervisor]
                    return ToolResult(ToolStatus(reply[0]), *reply[1:])
        raise SandboxUnavailable(f"the sandbox's processes are lost again and again: {self._last_words()}")

    def _ask(self, supervisor: socket.socket, request: ToolRequest) -> list | None:
        """What `watch` returns for a request to a supervisor; None if that is lost."""
        try:
            message = json.dumps([request.kind, request.code, request.stdin])
            supervisor.sendall(message.encode() + b"\n")
            with supervisor.makefile("rb") as replies:
                line = replies.readline()
        except OSError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def _connect(self) -> socket.socket:
        """A socket to a new supervisor. Starts the zygote where none runs."""
        with self.lock:
            if self.zygote is None:
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self.control, [b"+"], [theirs.fileno()])
                except OSError:
                    self._stop()  # the caller finds `ours` closed and comes again
        ours.settimeout(self.spec["timeout"] + 60)  # supervisors keep the time: this is for the loss of one
        return ours

    def _start(self) -> None:
        """Start the zygote and try it; where namespaces are refused, warn, and start it without."""
        self.control, theirs = socket.socketpair()
        single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        environment = dict(PATH=os.defpath, LANG="C.UTF-8", TMPDIR=tempfile.gettempdir(), **single)
        with theirs:
            spec = json.dumps(dict(self.spec, control=theirs.fileno()))
            try:
                self.zygote = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", __file__, spec], env=environment, stderr=self.log,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    start_new_session=True)  # Ctrl-C is for the caller
            except OSError as error:
                raise SandboxUnavailable(f"the sandbox does not start: {error}") from error
        with self._connect() as supervisor:
            reply = self._ask(supervisor, ToolRequest("import wave"))  # a module that is not loaded yet
        if reply and reply[0] == "ok":
            return
        self._stop()
        reason = reply[2] if reply else self._last_words()
        if not self.spec["isolate"]:
            raise SandboxUnavailable(f"the sandbox does not start: {reason}")
        warnings.warn("LocalSandbox runs model code WITHOUT ISOLATION: it can read and write your files and "
                      f"use the network, as this system refuses namespaces ({reason})", stacklevel=2)
        self.spec["isolate"] = False
        self._start()

    def _stop(self) -> None:
        if self.zygote:
            self.control.close()
            self.zygote.wait()
            self.zygote = None

    def _last_words(self) -> str:
        """The last line of the log of our own processes."""
        end = os.pread(self.log.fileno(), 4096, max(0, os.fstat(self.log.fileno()).st_size - 4096))
        return (end.decode("utf-8", "replace").strip().splitlines() or ["nothing is known"])[-1]


if __name__ == "__main__":
    zygote(json.loads(sys.argv[1]))
