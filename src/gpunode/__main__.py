"""`python -m gpunode` is the gpunode command."""

from gpunode.cli.main import main

if __name__ == "__main__":
    main()
