# ruff: noqa: E501  (programs as they would be written)
"""Hostile submissions: each would like to pass without knowing the answer, or to do harm on the way.

``READING`` ones look for ``SECRET``, an answer that cannot be computed. ``ATTACKS`` answer the doubling problem; none
prints 42 as its output, so a verdict "right" is a hole. ``SLOW`` ones use up their time limit. Each of ``PROBES`` prints
the list of what it could reach, which must be empty.
"""

from __future__ import annotations

SECRET = "918273645"
"""The expected answer of ``READING``; the test also puts it into its own memory, environment and files."""

_C = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_ANSWERS = "import os, re, sys\nn = input()\ndef show(t):\n    for m in re.findall(r'[0-9]{9}', t): print(m)\n"

READING = {
    "frames": _ANSWERS
    + "frame = sys._getframe()\nwhile frame:\n    for value in list(frame.f_locals.values()): show(repr(value))\n"
    "    frame = frame.f_back",
    "garbage collector": _ANSWERS
    + "import gc\nfor o in gc.get_objects():\n    if isinstance(o, (dict, list, tuple, str)) and len(o) < 1000:\n"
    "        try: show(repr(o))\n        except Exception: pass",
    "files": _ANSWERS
    + "for root in ('/box', '/tmp', '.', '/work', '/home', '/root', os.path.dirname(__file__) + '/../..'):\n"
    "    for folder, _, names in os.walk(root):\n        for name in names:\n"
    "            try: show(open(os.path.join(folder, name), errors='ignore').read())\n            except OSError: pass",
    "proc memory": _ANSWERS
    + "for pid in ('self', str(os.getppid()), '1', '2'):\n    try:\n        maps = open(f'/proc/{pid}/maps').read()\n"
    "        mem = open(f'/proc/{pid}/mem', 'rb')\n    except OSError: continue\n    for line in maps.splitlines():\n"
    "        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n        try:\n            mem.seek(low)\n"
    "            show(mem.read(high - low).decode('latin-1'))\n        except (OSError, ValueError, OverflowError): pass",
    "descriptors": _ANSWERS
    + "for fd in (0, *range(3, 256)):\n    try:\n        os.lseek(fd, 0, 0)\n        show(os.read(fd, 1 << 20).decode())\n"
    "    except OSError: pass",
    "environment": _ANSWERS + "show(repr(os.environ) + repr(sys.argv))",
}

ATTACKS = {
    # deciding the verdict
    "patched builtins": "import builtins\nbuiltins.len = lambda *a: 42\nbuiltins.all = lambda *a: True\n"
    "builtins.AssertionError = Exception\nprint(len(''), 0)",
    "patched modules": "import json, sys, io\njson.loads = json.dumps = lambda *a, **k: 'true'\n"
    "sys.modules['json'] = None\nsys.stdout = io.StringIO()\nprint(42)",
    "equal to everything": "class E(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\nprint(E('x'))",
    "exit 0": "import os\nos._exit(0)",
    "exit by a magic number": "import os\nprint('all tests passed')\nos._exit(42)",
    "exit in a hook": "import atexit, os, sys\natexit.register(lambda: os._exit(0))\nsys.excepthook = lambda *a: "
    "os._exit(0)\nraise SystemExit('passed')",
    "forged markers": 'import sys\nfor f in (sys.stdout, sys.stderr):\n    print(\'OK\\nPASSED\\n{"passed": true, "reward"'
    ": 1}', file=f)",
    "forged at the gate": "import os\nfor fd in range(256):\n    for word in (b'r', b'g', b'\\x00', b'42\\n'):\n"
    "        try:\n            if fd > 2: os.write(fd, word)\n        except OSError: pass",
    "look-alike digits": "print('\\uff14\\uff12')",  # full-width 42
    "look-alike space": "print('4\\u200b2')\nprint('42\\x00')",
    "both answers": "print('8 42 8')",
    "runner rewritten": "import sys\nfor path in (sys.argv[0], '/box/runner.py', __file__):\n    try:\n"
    "        open(path, 'w').write('print(42)')\n    except OSError: pass",
    # floods
    "memory": "x = [bytearray(1 << 24) for _ in range(1 << 12)]",
    "memory by mapping": "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(4096)]\n[m.write(b'x' * (1 << 26)) for m "
    "in x]",
    "memory by pipes": "import os, fcntl\nfor _ in range(10000):\n    r, w = os.pipe()\n    fcntl.fcntl(w, 1031, 1 << 20)\n"
    "    os.set_blocking(w, False)\n    os.write(w, b'x' * (1 << 20))",
    "memory files": _C + "for _ in range(100):\n    fd = os.memfd_create('x')\n    os.write(fd, b'x' * (1 << 24))",
    "shared memory": _C + "assert libc.shmget(0, 1 << 30, 0o1600) >= 0\n",
    "disk": "for n in range(10**5): open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 24))",
    "disk in devices": "for n in range(10**5): open(f'/dev/shm/{n}', 'wb').write(b'x' * (1 << 20))",
    "many empty files": "for n in range(3 * 10**4): open(f'/tmp/{n}', 'w').close()\nraise SystemExit(1)",
    "output": "while True: print('42' * 10000)",
    "one long line": "import sys\nwhile True: sys.stdout.write('4' * 65536)",
    "repeated right answer": "print('42\\n' * (1 << 22))",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\nos._exit(1)",
    "forks that stay": "import os, time\nfor _ in range(1000):\n    try:\n        if os.fork() == 0: time.sleep(600)\n"
    "    except OSError: break\nprint(0)",
    "threads": "import threading, time\nfor _ in range(10000): threading.Thread(target=time.sleep, args=(600,), daemon="
    "True).start()",
    "deep recursion": "import sys, ctypes\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)",
    "giant integer": "print(7 ** (10 ** 7) % (10 ** 10 ** 6))",
    # outliving
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for fd in (0, 1, 2): "
    "os.close(fd)\n        time.sleep(600)\n    os._exit(0)\nprint(1)",
    "left files": "import os\nfor folder in ('/tmp', '/dev/shm', '/var/tmp', '.'):\n    try: open(folder + '/sitecustomize.py', "
    "'w').write('print(42)')\n    except OSError: pass\nprint(open('/tmp/sitecustomize.py').read().count('x'))",
    "thread that goes on": "import threading, os\ndef spin():\n    while True: os.getppid()\nthreading.Thread(target=spin, "
    "daemon=True).start()\nprint(1)",
    # reaching others
    "signals to all": "import os\nos.kill(-1, 9)",
    "signals to the parent": "import os, signal\nfor pid in (os.getppid(), 1, 0):\n    for n in (9, 15, 19):\n        try:\n"
    "            if pid: os.kill(pid, n)\n        except OSError: pass\nos.killpg(0, 9)",
    "ptrace": _C + "assert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "memory of others": _C
    + "buf = ctypes.create_string_buffer(8)\nassert libc.process_vm_readv(os.getppid(), buf, 1, buf, 1,"
    " 0) >= 0",
    "writes to proc": "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/self/oom_score_adj', "
    "'/sys/fs/cgroup/memory/cgroup.procs'):\n    open(path, 'w').write('0')",
    "namespaces": _C + "assert libc.unshare(0x10000000) == 0",
    "setuid": _C + "assert libc.setuid(0) == 0",
    "keys": _C + "assert libc.syscall(248, b'user', b'x', b'y', 1, -3) > 0",
    "io_uring": _C + "assert libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0",
    "network": "import socket\ns = socket.create_connection(('127.0.0.1', 22), 1)\nprint(42)",
    "datagrams": "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', 53))",
    "local sockets": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0/tmp/x')",
    "symlinks": "import os\nos.symlink('/etc/passwd', '/tmp/link')\nprint(open('/tmp/link').read())",
    "raised limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "32-bit calls": "import mmap, ctypes\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
    "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nf()\nprint(1)",
    "calls by other doors": _C
    + "import os\nfd = os.open('/bin/true', os.O_RDONLY)\nassert libc.syscall(322, fd, b'', None, None, 0x1000) >= 0",  # execveat
    "bytecode of the library": "import importlib.util, json, os, site, sys\nplaces = [importlib.util.cache_from_source(json."
    "__file__), json.__file__]\nfor folder in (*sys.path, site.getusersitepackages(), '/usr/lib/python3'):\n    places += [folder + "
    "'/usercustomize.py', folder + '/x.pth']\nmade = 0\nfor place in places:\n    try:\n        os.makedirs(os.path.dirname"
    "(place), exist_ok=True)\n        open(place, 'ab').write(b'print(42)')\n        made += place.startswith(('/usr', sys.prefix"
    "))\n    except OSError: pass\nif made: print(42)",
    "descriptors shut and opened again": "import os\nos.closerange(0, 256)\nfor _ in range(8): os.open('/dev/null', os.O_RDWR)\n"
    "os.write(1, b'42')",
    "answer into its own input": "import os\nos.ftruncate(0, 0)\nos.lseek(0, 0, 0)\nos.write(0, b'42')",
    "descriptors in flight": "import array, os, socket\nfor _ in range(60):\n    a, b = socket.socketpair()\n    for _ in range(200):\n"
    "        a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 100))], socket.MSG_DONTWAIT)",
    "folders without end": "import os\nfor n in range(10 ** 5):\n    os.mkdir('d')\n    os.chdir('d')",
    "locks on what is read": "import fcntl\nfcntl.flock(open(__file__), fcntl.LOCK_EX)\nfcntl.lockf(open('/dev/null', 'r+'), 2)",
    "dump of memory": "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()",
    "niced up": "import os\nfor do in (lambda: os.nice(-20), lambda: os.sched_setaffinity(0, range(64)), lambda: os.setpriority(0, "
    "0, -20)):\n    try: do()\n    except (OSError, AttributeError): pass\nprint(os.getpriority(0, 0) < 0 and 42)",
    "broken stdin": "import os\nos.close(0)\nos.close(1)\nos.close(2)",
}

SLOW = {
    "sleep": "import time\ntime.sleep(600)",
    "spin": "while True: pass",
    "signals ignored": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "closed pipes": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    "thread that outlives main": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "spin in C": "(10 ** 10 ** 8) ** 2",
    "stopped": "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
}

_FOUND = "found = []\ndef reach(name, do):\n    try: do()\n    except Exception: return\n    found.append(name)\n"

PROBES = {
    "host files": _FOUND
    + "for path in {paths!r}:\n    reach(path, lambda: open(path).read())\n    reach(path + ' w', lambda: open(path, 'a'))\n"
    "print(found)",
    "calls": _C
    + _FOUND
    + "def call(name, *a):\n    def do():\n        if libc.syscall(*a) < 0: raise OSError\n    reach(name, do)\n"
    "import platform\nif platform.machine() == 'x86_64':\n    call('ptrace', 101, 0, 0, 0, 0)\n    call('mount', 165, 0, 0, 0, "
    "0, 0)\n    call('unshare', 272, 0x20000)\n    call('memfd', 319, b'x', 0)\n    call('shmget', 29, 0, 4096, 0o1600)\n"
    "    call('msgget', 68, 0, 0o1600)\n    call('semget', 64, 0, 1, 0o1600)\n    call('mq', 240, b'x', 0o102, 0o600, 0)\n"
    "    call('keyring', 250, 0, -3, 0)\n    call('bpf', 321, 0, 0, 0)\n    call('perf', 298, 0, 0, -1, -1, 0)\n"
    "    call('userfaultfd', 323, 1)\n    call('io_uring', 425, 8, ctypes.create_string_buffer(256))\n"
    "    call('pidfd', 434, os.getppid(), 0)\n    call('clone namespaces', 56, 0x10000011, 0, 0, 0, 0)\n"
    "    call('prlimit of the parent', 302, os.getppid() or 2, 7, 0, ctypes.create_string_buffer(16))\n"
    "    call('priority of others', 141, 0, os.getppid(), 19)\n    call('inotify', 294, 0)\n    call('fanotify', 300, 0, 0)\n"
    "    call('chroot', 161, b'/')\n    call('personality', 135, 0x0400000)\n    call('death signal', 157, 1, 0, 0, 0, 0)\n"
    "    call('typed into a terminal', 16, 0, 0x5412, b'x')\n"
    "    for number in (10 ** 9, 103, 129, 144, 151, 154, 155, 159, 163, 164, 167, 169, 170, 172, 175, 188, 203, 222, 227, 246, 249,\n"
    "                   251, 256, 275, 278, 285, 303, 304, 308, 311, 312, 322, 424, 425, 429, 430, 435, 438, 440, 444, 447, 449):\n"
    "        call(number, number, 0, 0, 0, 0, 0)\n"
    "    for option in (4, 8, 22, 24, 28, 36, 38, 47, 55, 59):\n        call(f'prctl {option}', 157, option, 0, 0, 0, 0)\nprint(found)",
    "descriptors": _FOUND + "import os\nfor fd in range(3, 512):\n    reach(fd, lambda: os.fstat(fd))\nprint(found)",
    "identity": "import os\nprint([os.getuid()] if os.getuid() < 1000 or os.getgroups() else [])",
    "signals": "import os\n" + _FOUND + "reach('parent', lambda: os.getppid() and os.kill(os.getppid(), 0) or 1 / "
    "os.getppid())\nprint(found)",
}
