// What the CPU engine does around its vector loops, as one unit: each file alone takes longer to start than to compile.
#include "batch_check.cpp"
#include "cpu_copy.cpp"
#include "cpu_exact.cpp"
#include "cpu_scale.cpp"
#include "layout.cpp"
#include "measure_ranges.cpp"
#include "parallel.cpp"
#include "scan_cpu.cpp"
