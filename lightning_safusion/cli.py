"""The ``safusion`` command, by the name that it has had in this package."""

from safusion_command import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
