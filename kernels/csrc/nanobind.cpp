// nanobind's own sources, compiled into the extension: the package then needs nothing of nanobind when it runs.
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nb_combined.cpp>
