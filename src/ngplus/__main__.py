"""``python -m ngplus``: the ``ngplus`` command."""

from ngplus.lab import main

if __name__ == "__main__":
    main()
