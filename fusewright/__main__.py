"""Command-line entry: `python -m fusewright`. Three lines, because functions sent to workers must not live here."""

from fusewright.cli import main

if __name__ == "__main__":
    main()
