"""Errors of values that cannot be stored or loaded."""

__all__ = ["StorageError", "StorageWarning"]


class StorageError(ValueError):
    """A checkpoint cannot be written, or does not match the tree that ``load`` expects.

    >>> import torch, torchard as ta
    >>> ta.save("step-100", {"w": torch.ones(4)})
    >>> ta.load("step-100", {"w": torch.ones(3), "b": torch.ones(2)})
    Traceback (most recent call last):
        ...
    torchard.StorageError: like['b'] is float32 [2], but .../step-100 has no key
        'b'; rename or drop it in like.
    like['w'] is float32 [3], but .../step-100 has float32 [4]; use that in like,
        and convert the result of load.
    """


class StorageWarning(UserWarning):
    """A checkpoint could not be checked for damage.

    >>> import os, torch, torchard as ta, warnings
    >>> ta.save("step-100", {"w": torch.ones(4)})
    >>> os.remove("step-100/.checksums")                               # plain DCP writes none
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     ta.load("step-100", {"w": torch.zeros(4)})
    {'w': tensor([1., 1., 1., 1.])}
    >>> caught[0].category is ta.StorageWarning
    True
    >>> print(caught[0].message)
    /.../step-100 has no checksums, which torchard's save writes and plain DCP does
    not, so damage to its values cannot be detected. Save it again with torchard.save to add them.
    """
