"""`python -m dpft` is the command `dpft`."""

from dpft.cli import main

if __name__ == "__main__":
    main()
