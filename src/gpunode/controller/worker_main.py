"""Entry point of the decision worker: `python -m gpunode.controller.worker_main`, started by the controller only.

A module apart, so that the classes on the pipe pickle under the name that the parent knows.
"""

import sys

from gpunode.controller.worker import serve

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
