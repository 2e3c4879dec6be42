"What a process of the tests begins with besides libraries: the code of the package as records name it, read once for all of them."

from dpft.book.provenance import source_hash

source_hash("dpft.book.evidence", "dpft.cli")
