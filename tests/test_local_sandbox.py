"""LocalSandbox: isolation, attacks, the loss of its own processes, and what is left behind."""

import contextlib
import glob
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest

import minirstar
import sandbox as sandbox_module
from sandbox import LocalSandbox, ToolRequest, ToolStatus, run_code

HERE = str(Path(__file__).parent)
linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def wait_until(condition, seconds=5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture(scope="module")
def sandbox():
    with LocalSandbox(workers=4, timeout=1.5, memory_mb=128) as sandbox:
        sandbox.run([ToolRequest("1")] * 4)
        if sys.platform == "linux" and not sandbox.spec["isolate"]:
            pytest.skip("this system refuses namespaces")
        yield sandbox


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "fallback"])
def either(request, tmp_path_factory):
    """With namespaces, and without, as on macOS."""
    if request.param and sys.platform != "linux":
        pytest.skip("namespaces are Linux's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("folders")))
        with LocalSandbox(workers=4, timeout=1.5, memory_mb=128, isolate=request.param) as sandbox:
            yield sandbox


def result(sandbox, code, **fields):
    return sandbox.run([ToolRequest(code, **fields)])[0]


def survivors(mark: str) -> list[int]:
    """Processes on the host with the mark in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.cmdline():
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    "field, value",
    [
        ("workers", 0),
        ("workers", 5000),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("memory_mb", 1),
        ("output_bytes", 0),
        ("processes", 0),
    ],
)
def test_bad_values_are_refused_by_name_and_range(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value!r}: must be from .* to "):
        LocalSandbox(**{field: value})


def test_run_code_in_this_process():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert run_code("x = 3\nx * 2", namespace := {}) == "ok"
        assert run_code("x / 0", namespace) == "error"
        assert run_code("raise MemoryError", namespace) == "memory"
        assert run_code("raise SystemExit(2)", namespace) == "error"
    assert out.getvalue() == "6\n" and namespace["x"] == 3
    assert 'File "<code>", line 1, in <module>\n    x / 0' in err.getvalue()
    assert "sandbox.py" not in err.getvalue()


@pytest.mark.parametrize(
    "code", ["print(1)", "1 / 0", "x = = 1", "def f(): g()\nf()", "'a'", "raise SystemExit('why')"]
)
def test_run_code_gives_what_the_sandbox_gives(sandbox, code):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_code(code, {"__name__": "__main__"})
    there = result(sandbox, code)
    assert (there.status, there.stdout, there.stderr) == (status, out.getvalue(), err.getvalue())


@linux
@pytest.mark.parametrize("path", ["/", "/usr", "/etc", "/var/tmp", "/sys", "/dev", "/run", sys.prefix, HERE])
def test_nothing_outside_can_be_written(sandbox, path):
    ended = result(sandbox, f"open('{path}/written-by-sandbox', 'w')")
    assert ended.status is ToolStatus.error and not os.path.exists(f"{path}/written-by-sandbox")


@linux
def test_tmp_is_private_small_and_the_home(sandbox):
    with tempfile.NamedTemporaryFile() as ours:
        code = (
            "import os, tempfile; tmp = tempfile.gettempdir(); open(tmp + '/a', 'w').write('b')\n"
            "print(os.listdir(tmp), os.path.expanduser('~') == tmp == os.getcwd(), end=' ')\n"
            f"print(os.path.exists({ours.name!r}))"
        )
        assert result(sandbox, code).stdout == "['a'] True False\n"
        assert os.path.exists(ours.name)
    code = "for i in range(9):\n    with open(str(i), 'wb') as f: f.write(bytes(32 << 20))"
    assert "OSError: [Errno 28] No space left on device" in result(sandbox, code).stderr
    assert "OSError: [Errno 27] File too large" in result(sandbox, "open('a', 'wb').truncate(1 << 40)").stderr


@linux
def test_home_and_run_are_hidden(sandbox):
    home = os.path.expanduser("~")
    code = f"import os; print([sorted(os.listdir(p)) for p in ({home!r}, '/run')])"
    shown, run = eval(result(sandbox, code).stdout)
    assert all(any(f"{home}/{name}" in prefix for prefix in (sys.prefix, sys.base_prefix)) for name in shown)
    assert run == []


@linux
def test_other_processes_cannot_be_seen_or_killed(sandbox):
    code = "import os; print(os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()], os.getppid())"
    assert result(sandbox, code).stdout == "1 ['1'] 0\n"
    results = sandbox.run(
        [
            ToolRequest("import os\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: pass"),
            ToolRequest("import time; time.sleep(0.5); print('alive')"),
            ToolRequest("import os; os.kill(os.getppid(), 9)"),
            ToolRequest("import os; os.killpg(0, 15)"),
        ]
    )
    assert [r.status for r in results][:2] == ["ok", "ok"] and results[1].stdout == "alive\n"
    assert result(sandbox, "1").status is ToolStatus.ok


@linux
def test_no_privileges(sandbox):
    status = dict(
        line.split(":\t", 1)
        for line in result(sandbox, "print(open('/proc/self/status').read())").stdout.splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0 and status["NoNewPrivs"] == "1"
    assert "0" not in status["Uid"].split()
    for code in (
        "import os; os.setuid(0)",
        "import os; os.mknod('x', 0o60600, 2049)",
        "open('/etc/shadow')",
        "import os; os.chroot('/tmp')",
        "open('/proc/sys/kernel/hostname', 'w').write('x')",
    ):
        assert result(sandbox, code).status is ToolStatus.error, code
    mount = "import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/', None, 0x1020, None))"  # as writable
    assert result(sandbox, mount).stdout == "-1\n"


@linux
def test_no_user_namespace_reopens_the_file_system(sandbox):
    code = (
        "import ctypes, os\nc = ctypes.CDLL(None)\nprint(c.unshare(0x10020000))\n"
        "print(c.mount(b'none', b'/', None, 0x1020, None))\nopen('/usr/written-by-sandbox', 'w')"
    )
    ended = result(sandbox, code)
    assert ended.stdout.splitlines()[-1] == "-1" and ended.status is ToolStatus.error


@linux
def test_no_network(sandbox):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert "OSError" in result(sandbox, code).stderr
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0minirstar-test")
        server.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('\\0minirstar-test')"
        assert "ConnectionRefusedError" in result(sandbox, code).stderr


@linux
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os, time\nfor i in range(200):\n    if os.fork() == 0: os.setsid(); time.sleep(60)",
    ],
)
def test_fork_bomb_is_bounded_and_does_not_disturb_others(sandbox, code):
    other = ToolRequest("import subprocess; subprocess.run('true')")
    bomb, *others = sandbox.run([ToolRequest(code), other, other, other])
    assert bomb.status in ("timeout", "error")
    assert [r.status for r in others] == ["ok"] * 3


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.Popen(['sleep', '{mark}'])",
        "import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '{mark}'])\n    os._exit(0)\nos.wait()",
        "import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nwhile True: pass",
    ],
)
def test_no_process_outlives_its_call(either, code):
    mark = str(1_000_000 + os.getpid() + abs(hash(code)) % 1_000_000)
    assert result(either, code.replace("{mark}", mark)).status in ("ok", "timeout")
    assert survivors(mark) == []


def test_fallback_has_the_limits(either):
    codes = {
        "while True: pass": "timeout",
        "x = bytearray(1 << 30)": "memory",
        "print('a' * (1 << 21))": "output_limit",
        "1 / 0": "error",
        "print(1)": "ok",
        "import os; os._exit(4)": "error",
    }
    assert [r.status for r in either.run([ToolRequest(code) for code in codes])] == list(codes.values())
    assert result(either, "x = 1", kind="jupyter", session="a").status == "ok"
    assert result(either, "x", kind="jupyter", session="a").stdout == "1\n"
    either.close("a")


def test_fallback_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalSandbox(workers=2, isolate=False) as sandbox:
        folder = result(sandbox, "import os; open('a', 'w').write('b'); print(os.getcwd())").stdout.strip()
    assert folder.startswith(str(tmp_path)) and os.listdir(tmp_path) == []


@linux
def test_refused_namespaces_are_warned_about_once(monkeypatch, tmp_path):
    refusing = tmp_path / "sandbox.py"
    refusal = 'raise OSError("unshare: Operation not permitted")\n    '
    call = 'libc("unshare", 0x64'
    refusing.write_text(Path(sandbox_module.__file__).read_text().replace(call, refusal + call))
    monkeypatch.setattr(sandbox_module, "__file__", str(refusing))
    with LocalSandbox(workers=1) as sandbox:
        with pytest.warns(UserWarning, match="ISOLATION.*unshare: Operation not permitted") as caught:
            assert result(sandbox, "40 + 2").stdout == "42\n"
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert result(sandbox, "40 + 2").stdout == "42\n"


def test_loss_of_all_its_processes_is_survived(either):
    result(either, "x = 5", kind="jupyter", session="a")
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    results = either.run([ToolRequest("print(1)")] * 8 + [ToolRequest("x", kind="jupyter", session="a")])
    assert [r.stdout for r in results] == ["1\n"] * 8 + ["5\n"]
    either.close("a")


def test_loss_of_its_processes_in_mid_call_is_survived():
    with LocalSandbox(workers=4, timeout=4) as sandbox:
        result(sandbox, "1")
        mine = descendants()
        killer = threading.Timer(0.5, lambda: [os.kill(p, signal.SIGKILL) for p in descendants() & mine])
        killer.start()
        results = sandbox.run([ToolRequest("import time; time.sleep(1); print(1)")] * 4)
        killer.join()
    assert [(r.status, r.stdout) for r in results] == [(ToolStatus.ok, "1\n")] * 4


@linux
def test_loss_of_the_zygote_alone_ends_its_supervisors(tmp_path):
    with LocalSandbox(workers=2) as sandbox:
        result(sandbox, "1")
        family = psutil.Process(sandbox.zygote.pid).children(recursive=True)
        sandbox.zygote.kill()
        assert wait_until(lambda: not any(process.is_running() for process in family))
        assert result(sandbox, "print(1)").stdout == "1\n"


def test_an_interpreter_that_does_not_start_is_unavailable(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with LocalSandbox(workers=1, isolate=False) as sandbox, pytest.raises(minirstar.SandboxUnavailable):
        sandbox.run([ToolRequest("1")])
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with LocalSandbox(workers=1, isolate=False) as sandbox, pytest.raises(minirstar.SandboxUnavailable):
        sandbox.run([ToolRequest("1")])


def test_close_leaves_no_process_and_no_descriptor():
    before, files = descendants(), len(os.listdir("/dev/fd"))
    with LocalSandbox(workers=3) as sandbox:
        session = ToolRequest("x = 1", kind="jupyter", session="a")
        sandbox.run([ToolRequest("1"), session, ToolRequest("1 / 0")])
        assert descendants() - before
    assert descendants() <= before and len(os.listdir("/dev/fd")) == files


@pytest.mark.parametrize("isolate", [True, False])
def test_nothing_outlives_a_killed_parent(isolate, tmp_path):
    if isolate and sys.platform != "linux":
        pytest.skip("namespaces are Linux's")
    program = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from minirstar import LocalSandbox, ToolRequest\n"
        f"sandbox = LocalSandbox(workers=4, timeout=60, isolate={isolate})\n"
        "sandbox.run([ToolRequest('x = 1', kind='jupyter', session='a')])\n"
        "print('ready', flush=True)\n"
        'code = \'import subprocess; open("a", "w"); subprocess.run(["sleep", "61"])\'\n'
        "sandbox.run([ToolRequest(code)] * 3"
        " + [ToolRequest('while True: pass')])\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        family = psutil.Process(parent.pid)
        assert wait_until(lambda: len(survivors("61")) >= 3)
        children = family.children(recursive=True)
        parent.kill()
    assert wait_until(lambda: not any(child.is_running() for child in children)), "processes survived"
    assert wait_until(lambda: not glob.glob(f"{tmp_path}/*")), "files survived"


def test_from_many_threads(sandbox):
    totals = []

    def work(i):
        totals.extend(
            r.stdout
            for r in sandbox.run(
                [
                    ToolRequest(f"print({i})"),
                    ToolRequest("n = globals().get('n', 0) + 1", kind="jupyter", session="shared"),
                ]
            )
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(filter(None, totals)) == sorted(f"{i}\n" for i in range(8))
    assert result(sandbox, "n", kind="jupyter", session="shared").stdout == "8\n"
    sandbox.close("shared")


HOSTILE = [
    "import os; os.write(3, b'0')",
    "import os; os.closerange(0, 99)",
    "import os; os.closerange(0, 99); 1 / 0",
    "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'0')\n    except OSError: pass\n1 / 0",
    "import os; os.dup2(1, 0); os.dup2(0, 2)",
    "import os; os.kill(1, 9); os.kill(1, 19)",
    "import sys; sys.stdout.close()",
    "import sys; sys.stdout = None; print(1)",
    "import sys; sys.stderr.close(); 1 / 0",
    "import sys; sys.modules.clear()",
    "__builtins__.clear() if isinstance(__builtins__, dict) else 0",
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); 'a' * 9999999",
    "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()",
    "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
]


@pytest.mark.parametrize("code", HOSTILE)
@pytest.mark.parametrize("kind", ["python", "jupyter"])
def test_hostile_code_gives_a_result_and_harms_nobody(sandbox, code, kind):
    ended = result(sandbox, code, kind=kind, session="hostile" if kind == "jupyter" else None)
    assert isinstance(ended.status, ToolStatus)
    sandbox.close("hostile")
    assert result(sandbox, "print('next')").stdout == "next\n"


def test_a_failing_call_cannot_print_itself_ok(sandbox):
    code = (
        'import os\nfor fd in range(99):\n    try: os.write(fd, b\'["ok", "", "", 0, true]\\n0\')\n'
        "    except OSError: pass\n1 / 0"
    )
    assert result(sandbox, code).status is ToolStatus.error


def mixed(n: int) -> tuple[list[ToolRequest], list[str]]:
    """n calls, of twenty one endless, one failing and one hungry; and the statuses that they must get."""
    kinds = [("while True: pass", "timeout"), ("[][0]", "error")]
    kinds += [("x = [bytearray(1 << 20) for _ in range(9999)]", "memory")]
    kinds += [(f"print({i})", "ok") for i in range(17)]
    return [ToolRequest(kinds[i % 20][0]) for i in range(n)], [kinds[i % 20][1] for i in range(n)]


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_mixed_calls_end_right_and_leave_nothing(n):
    requests, statuses = mixed(n)
    before, files = descendants(), len(os.listdir("/dev/fd"))
    with LocalSandbox(workers=8, timeout=1.0, memory_mb=128) as sandbox:
        results = sandbox.run(requests)
        assert [r.status for r in results] == statuses
        assert len(descendants() - before) <= 2 + 8  # two for the zygote and a supervisor for each worker
        assert not any(psutil.Process(p).status() == psutil.STATUS_ZOMBIE for p in descendants() - before)
    assert descendants() <= before and len(os.listdir("/dev/fd")) == files
    assert not Path("/tmp").joinpath("a").exists()
