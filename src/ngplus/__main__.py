"""``python -m ngplus``: the ``ngplus`` command.

On the way from gradient to step: beside it, the door to the laboratory.
"""

from ngplus.lab import main

if __name__ == "__main__":
    main()
