"""Where images come from; importing the package registers the formats of image files.

Without Pillow or tifffile, as on a machine that checks its GPU with torch alone, there are fewer.
"""

import importlib

for _format, _library in (("whole", "PIL"), ("tiff", "tifffile")):
    try:
        importlib.import_module(f"hires.data.{_format}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("PIL", "tifffile"):
            raise
