"""Run command lines in forks of one process that has not imported torch, and time each of them.

python tests/helpers/without_torch.py < [[WORD, ...], ...] -> [{"code", "torch", "seconds", "said"}]
"""

import json
import os
import resource
import sys
import tempfile
import time

from flowrl.cli.main import main
from flowrl.config import load_config
from flowrl.config.facts import of_config

of_config(load_config(None, []))  # imports what most commands need
IMPORTS = time.process_time()  # of a process of its own, before it reads its words


def run(words):
    with tempfile.TemporaryFile() as printed:
        if not (pid := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (10, 10))  # a command that starts to work
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            sys.argv = ["flowrl", *words]
            code = 99  # of an exception, which is printed
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            os._exit(code + 100 * ("torch" in sys.modules))
        _, status, used = os.wait4(pid, 0)
        printed.seek(0)
        imported, code = divmod(max(0, os.waitstatus_to_exitcode(status)), 100)
        return {
            "code": code,
            "torch": bool(imported),
            "seconds": IMPORTS + used.ru_utime + used.ru_stime,
            "said": printed.read().decode(),
        }


if __name__ == "__main__":
    assert "torch" not in sys.modules
    json.dump([run(words) for words in json.load(sys.stdin)], sys.stdout)
