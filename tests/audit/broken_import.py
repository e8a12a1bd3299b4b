"""Does not import."""


def _prepare():
    raise RuntimeError("no such backend: abacus")


_prepare()
