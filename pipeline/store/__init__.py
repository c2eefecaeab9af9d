"""Results of stages on disk, found again by fingerprint.

On disk: ``<stage>/<fingerprint>/`` with ``record.json``, its ``.work`` folder, its ``.lock``; ``runs/``,
``quarantine/``, ``trash/``. An entry counts only if its record is sound and its files are those of the record:
`Store.find` returns it or None.
"""
