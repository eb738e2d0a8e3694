"""Sizes that programs are compiled for: powers of two, so that they are few."""


def power_of_two_from(number: int, least: int = 1) -> int:
    """The least power of two that is at least `number` and `least`, itself one."""
    return max(least, 1 << max(int(number) - 1, 0).bit_length())


def power_of_two_to(number: int) -> int:
    """The greatest power of two that is at most `number`; 1 for less than 1."""
    return 1 << (max(int(number), 1).bit_length() - 1)
