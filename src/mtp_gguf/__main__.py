"""`python -m mtp_gguf`: the command line."""

from mtp_gguf.cli import main

if __name__ == "__main__":
    main()
