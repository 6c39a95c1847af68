"""Where bytes come from and go to: any store, the files a pattern names, a local copy of each.

redaction.py   what may be shown of a URI or of a driver's message
storage_errors.py      any driver's failure, in words
filesystems.py     fsspec file systems by protocol, with options and credentials
glob_patterns.py    wildcards, and names that hold their signs
storage.py      Storage: list, read, put, delete
log_files.py     the input files of a pattern, hour by hour
file_cache.py       remote files, copied once
atomic.py      local files, seen whole or not at all
file_lock.py        a local file that tells who is at work
"""
