"""`python -m pipelines VERB`."""

from pipelines.cli import program

if __name__ == "__main__":
    program()
