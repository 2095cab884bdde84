"""C++ that is compiled at run time: the compiler, the cache of libraries on disk, and helpers."""
