"""`python -m shardset VERB`."""

from shardset.verbs import program

if __name__ == "__main__":
    program()
