"""The formats of image files: each module here registers its suffixes in ``FORMATS``."""
