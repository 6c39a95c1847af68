"""Access to files anywhere: any store, the log files that a pattern names, local copies of remote files.

storage.py          Storage: list, read, put, create, delete
filesystems.py      fsspec file systems by protocol, with options and credentials
storage_errors.py   failures of any driver as StorageError
redaction.py        URIs and messages without secrets
glob_patterns.py    wildcards, and names that contain wildcard characters
log_files.py        the input files of a pattern, hour by hour
file_cache.py       local copies of remote files
atomic.py           atomic writes of local files
file_lock.py        a local lock file that names its owner
"""
