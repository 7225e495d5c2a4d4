"""The command line: one file a command."""

import sys

from flowrl.runtime.install import foreign

# said here, before any other import: one may fail for files of the other package
if (_found := foreign()) and sys.stderr:
    print(f"flowrl: {_found}", file=sys.stderr)
