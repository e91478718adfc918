"""C kernels over packed channels, and the plain functions that call them: single precision, on the CPU.

They are compiled when they are first needed, by the system's C compiler for this very processor; see `library`.
"""
