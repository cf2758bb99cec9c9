// Marks a leaf function that the compiler makes once for each instruction set; which one runs is chosen at load time.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)  // whose runtime is not up yet when clones are resolved
#define NANSCAN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NANSCAN_CLONES
#endif
