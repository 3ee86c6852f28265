"""What every Sandbox guarantees: one suite over all implementations, each an entry of FACTORIES."""

import time

import pytest

import minirstar
from minirstar import ToolRequest, ToolStatus

FACTORIES = {"LocalSandbox": minirstar.LocalSandbox}


@pytest.fixture(scope="module", params=FACTORIES)
def factory(request):
    return FACTORIES[request.param]


@pytest.fixture(scope="module")
def sandbox(factory):
    with factory(workers=4, timeout=1.5, memory_mb=128, output_bytes=1 << 16) as sandbox:
        yield sandbox


@pytest.fixture
def run(sandbox):
    def run(code, **fields):
        [result] = sandbox.run([ToolRequest(code, **fields)])
        return result
    return run


@pytest.fixture
def cell(sandbox, request):
    """Runs one cell after another in a session of the test's own."""
    name = request.node.name

    def cell(code, stdin=""):
        [result] = sandbox.run([ToolRequest(code, stdin, kind="jupyter", session=name)])
        return result
    yield cell
    sandbox.close(name)


def test_no_requests(sandbox):
    assert sandbox.run([]) == []


def test_output_and_time(run):
    result = run("import sys, time\ntime.sleep(0.2)\nprint('out')\nprint('err', file=sys.stderr)")
    assert (result.status, result.stdout, result.stderr) == (ToolStatus.ok, "out\n", "err\n")
    assert 0.2 <= result.seconds < 1.5


@pytest.mark.parametrize("code, stdout", [
    ("x = 20\nx + 22", "42\n"), ("'a'", "'a'\n"), ("None", ""), ("x = 5", ""), ("", ""), ("# nothing", ""),
    ("print(1)\n[2]", "1\n[2]\n"), ("if True:\n    7", ""),
])
def test_last_expression_is_printed(run, code, stdout):
    result = run(code)
    assert (result.status, result.stdout, result.stderr) == (ToolStatus.ok, stdout, "")


def test_stdin_is_given_and_its_absence_is_end_of_file(run):
    assert run("print(input() + input())", stdin="a\nb\n").stdout == "ab\n"
    assert run("input()").stderr.endswith("EOFError: EOF when reading a line\n")
    assert run("import sys; len(sys.stdin.read())", stdin="é" * 1_000_000).stdout == "1000000\n"
    assert run("1", stdin="unread " * 1_000_000).status is ToolStatus.ok


def test_traceback_shows_the_users_frames_only(run):
    result = run("import json\ndef f():\n    return json.loads('{')\nf()\n")
    assert result.status is ToolStatus.error
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1:3] == ['  File "<code>", line 4, in <module>', "    f()"]
    assert '  File "<code>", line 3, in f' in lines
    assert lines[-1].startswith("json.decoder.JSONDecodeError")
    assert result.stderr.count("File ") == 2


def test_syntax_error(run):
    result = run("print('never')\nx = = 1")
    assert (result.status, result.stdout) == (ToolStatus.error, "")
    assert result.stderr.startswith('  File "<code>", line 2\n    x = = 1\n')
    assert result.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"


@pytest.mark.parametrize("code, status", [
    ("import sys; sys.exit()", "ok"), ("import sys; sys.exit(0)", "ok"), ("import sys; sys.exit(3)", "error"),
    ("import sys; sys.exit('why')", "error"), ("raise KeyboardInterrupt", "error"),
    ("raise GeneratorExit", "error"),
    ("import os; os._exit(0)", "ok"), ("import os; os._exit(7)", "error"), ("import os; os.abort()", "error"),
    ("import ctypes; ctypes.string_at(0)", "error"), ("print('Traceback: Error: failed')", "ok"),
    ("print('ok'); raise ValueError", "error"),
    ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", "ok"),
])
def test_status_comes_from_the_exit_and_not_from_text(run, code, status):
    assert run(code).status == status


@pytest.mark.parametrize("code", ["a\0b", "x = '\ud800'", "(" * 1000, "\tif", "return 1", "await x"])
def test_code_that_does_not_compile(run, code):
    assert run(code).status is ToolStatus.error


def test_output_that_is_not_utf8(run):
    result = run("import os; os.write(1, b'\\xff\\xfea\\n'); os.write(2, b'\\x80'); None")
    assert (result.status, result.stdout, result.stderr) == (ToolStatus.ok, "\ufffd\ufffda\n", "\ufffd")


def test_state_is_fresh(run):
    assert run("import math, builtins; math.pi = 3; builtins.len = None; x = 1").status is ToolStatus.ok
    assert run("import math; print(math.pi > 3, len('a'), 'x' in globals())").stdout == "True 1 False\n"
    assert run("open('left', 'w').write('a'); None").status is ToolStatus.ok
    assert run("import os; os.listdir('.')").stdout == "[]\n"


def test_random_numbers_differ_between_calls(sandbox):
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = sandbox.run([ToolRequest(code)] * 2)
    assert set(first.stdout.split()).isdisjoint(second.stdout.split())


def test_it_is_a_main_module(run):
    code = "import pickle\nclass A: pass\nprint(__name__, type(pickle.loads(pickle.dumps(A()))) is A)"
    assert run(code).stdout == "__main__ True\n"


def test_exit_handlers_and_threads_are_waited_for(run):
    code = ("import atexit, threading, time\natexit.register(print, 'exit')\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')")
    assert run(code).stdout == "main\nthread\nexit\n"


@pytest.mark.parametrize("code", [
    "import xml.dom.minidom; xml.dom.minidom.parseString('<a/>').documentElement.tagName",
    "import networkx; networkx.path_graph(3).number_of_nodes()",
    "import sympy; sympy.integrate(sympy.Symbol('x'))", "import numpy; numpy.linalg.inv(numpy.eye(3))[0, 0]",
    "import multiprocessing\nwith multiprocessing.Pool(2) as pool:\n    print(pool.map(abs, [-1]))",
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True); None",
])
def test_ordinary_programs_run(run, code):
    result = run(code)
    assert (result.status, result.stderr) == (ToolStatus.ok, "") and result.stdout


def test_results_are_in_the_order_of_requests(sandbox):
    codes = [f"import time; time.sleep({0.2 if i % 3 == 0 else 0}); print({i})" for i in range(12)]
    results = sandbox.run([ToolRequest(code) for code in codes])
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(12)]


def test_calls_run_at_once(sandbox):
    start = time.monotonic()
    sandbox.run([ToolRequest("import time; time.sleep(0.5)")] * 4)
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize("code", [
    "print('before')\nwhile True: pass", "import time; print('before'); time.sleep(60)",
    "import signal; print('before'); signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()",
    "import os, time; print('before'); os.close(1); os.close(2); time.sleep(60)",
    "print('before'); import os; os.kill(os.getpid(), 19)\nwhile True: pass",
    "print('before')\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "import threading, time; print('before'); threading.Thread(target=time.sleep, args=(60,)).start()",
])
def test_time_limit(run, code):
    result = run(code)
    assert (result.status, result.stdout) == (ToolStatus.timeout, "before\n")
    assert 1.5 <= result.seconds < 2.5


@pytest.mark.parametrize("code", [
    "x = bytearray(1 << 30)", "x = 'a'\nwhile True: x += x", "import numpy; numpy.ones((1 << 14, 1 << 14))",
    "def f(n): return [f(n - 1), bytearray(1 << 22)] if n else []\n[f(50) for _ in range(100)]",
])
def test_memory_limit(run, code):
    result = run(code)
    assert result.status is ToolStatus.memory and "MemoryError" in result.stderr


def test_memory_below_the_limit_is_available(run):
    assert run("x = bytearray(90 << 20); len(x)").stdout == f"{90 << 20}\n"


@pytest.mark.parametrize("code", [
    "while True: print('a' * 100)", "print('a' * (1 << 28))",
    "import sys\nwhile True: sys.stderr.write('a' * 1000)",
    "import os\nwhile True: os.write(1, b'a' * 65536)", "print('a' * 65536)",
])
def test_output_limit(factory, code):
    with factory(workers=1, timeout=10, memory_mb=2048, output_bytes=1 << 16) as sandbox:
        [result] = sandbox.run([ToolRequest(code)])
    assert result.status is ToolStatus.output_limit
    assert result.seconds < 5
    text = result.stdout + result.stderr
    assert 1 << 16 <= len(text) <= 1 << 17 and set(text) <= {"a", "\n"}


def test_output_at_the_limit_is_whole(run):
    result = run(f"print('a' * {(1 << 16) - 1})")
    assert (result.status, len(result.stdout)) == (ToolStatus.ok, 1 << 16)


def test_output_held_open_by_a_grandchild_does_not_delay(run):
    result = run("import os, time\nif os.fork() == 0: time.sleep(60)\nprint('parent')")
    assert (result.status, result.stdout) == (ToolStatus.ok, "parent\n")
    assert result.seconds < 1


def test_nothing_inherited(run):
    code = "import os; print(sorted(os.listdir('/dev/fd'))[:3], len(os.listdir('/dev/fd')))"
    assert run(code).stdout == "['0', '1', '2'] 4\n"  # the fourth is of listdir itself


def test_environment_is_scrubbed(factory, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    code = ("from os import environ, getcwd\n"
            "print('SECRET_TOKEN' in environ, environ['HOME'] == environ['TMPDIR'] == getcwd())")
    with factory(workers=1) as sandbox:
        assert sandbox.run([ToolRequest(code)])[0].stdout == "False True\n"


def test_session_keeps_its_state(cell, sandbox):
    assert cell("import math\nx = 1").status is ToolStatus.ok
    assert cell("x += 1; math.floor(x)").stdout == "2\n"
    assert cell("1 / 0").status is ToolStatus.error
    assert cell("input()", stdin="typed").stdout == "'typed'\n"
    assert cell("x").stdout == "2\n"
    [other] = sandbox.run([ToolRequest("x", kind="jupyter", session="other")])
    assert other.stderr.endswith("NameError: name 'x' is not defined\n")
    sandbox.close("other")


def test_cells_of_one_session_run_in_order(sandbox):
    requests = [ToolRequest("import time; x = 0", kind="jupyter", session="s")]
    for i in (1, 1, 0):
        code = f"time.sleep(0.01); x = 2 * x + {i}; x"
        requests.append(ToolRequest(code, kind="jupyter", session="s"))
    assert [r.stdout for r in sandbox.run(requests)] == ["", "1\n", "3\n", "6\n"]
    sandbox.close("s")


@pytest.mark.parametrize("loss, status", [
    ("while True: pass", "timeout"), ("y = bytearray(1 << 30)", "memory"),
    ("while True: print('a' * 999)", "output_limit"),
    ("import os; os._exit(3)", "error"), ("import ctypes; ctypes.string_at(0)", "error"),
])
def test_lost_session_is_replayed_without_the_cell_that_lost_it(cell, loss, status):
    cell("print('noise'); x = [1]")
    cell("x.append(2); 1 / 0")
    assert cell("x.append('lost')\n" + loss).status == status
    result = cell("x")
    assert (result.status, result.stdout, result.stderr) == (ToolStatus.ok, "[1, 2]\n", "")


def test_traceback_of_an_older_cell_shows_its_line(cell):
    cell("def f():\n    return 1 / 0")
    stderr = cell("f()").stderr
    assert "return 1 / 0" in stderr and stderr.count("f()") == 1


def test_closed_session_is_forgotten(cell, sandbox, request):
    cell("x = 1")
    sandbox.close(request.node.name)
    assert cell("x").status is ToolStatus.error


@pytest.mark.parametrize("answer, gold, verdict", [
    ("1/2", "0.5", True), (r"\frac{1}{2}", "1/2", True), (r"$\frac12$", "0.5", True), ("7", "7", True),
    ("8", "7", False), ("3, 7", "7", False), ("x^2+2x+1", "(x+1)^2", True), (r"\boxed{5}", "5", True),
    ("", "5", False), ("}{", "5", False),
    ("x**2", "x^2", True), ("True", "5", False),
])
def test_check(run, answer, gold, verdict):
    result = run(answer, stdin=gold, kind="check")
    assert (result.status, result.stdout) == (ToolStatus.ok, f"{verdict}\n")


def test_check_runs_no_model_code(run):
    assert run("print('True')", stdin="5", kind="check").stdout == "False\n"
    assert run("__import__('os')._exit(0)", stdin="5", kind="check").stdout == "False\n"


def test_check_has_limits(run):
    result = run("9^{9^{9^{9^9}}}", stdin="(x+1)^{99999999}", kind="check")
    assert result.stdout != "True\n" and result.seconds < 3


@pytest.mark.parametrize("fields", [
    {"kind": "cpp"}, {"kind": "jupyter"}, {"kind": "jupyter", "session": ""}])
def test_callers_mistake(sandbox, fields):
    with pytest.raises(ValueError, match=fields["kind"]):
        sandbox.run([ToolRequest("1", **fields)])


def test_a_closed_sandbox_is_unavailable(factory):
    sandbox = factory(workers=1)
    sandbox.close()
    sandbox.close()
    with pytest.raises(minirstar.SandboxUnavailable):
        sandbox.run([ToolRequest("1")])
