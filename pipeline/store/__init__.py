"""Results of stages on disk, found again by fingerprint.

::

    store = Store(Path("store"))
    with store.working("quantize", fingerprint(payload)) as work:
        entry = work.existing
        if entry is None:
            (work.path / "model.safetensors").write_bytes(...)      # finished pieces stay here after a crash
            entry = work.commit(payload=payload, result={"layers": 32}, started=started, tools={"torch": "2.10.0"})
    entry.file("model.safetensors")

On disk: ``<stage>/<fingerprint>/`` with ``record.json``, its ``.work`` folder, its ``.lock``; ``runs/``,
``quarantine/``, ``trash/``. An entry counts only if its record is sound and its files are those of the record:
`Store.find` returns it or None.
"""
