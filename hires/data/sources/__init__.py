"""The data sets that ``data=NAME`` chooses: each module here registers its own in ``SOURCES``."""
