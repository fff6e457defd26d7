"""`python -m trainer`."""

from trainer.cli import program as program

if __name__ == "__main__":
    program()
