"""`python -m fedgma` is `fedgma`."""

from fedgma.cli import main

if __name__ == "__main__":
    main()
