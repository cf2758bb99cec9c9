// Counts the bytes that a process holds from malloc, and their peak: LD_PRELOAD it, then ask through ctypes.
// Sizes are what the allocator hands out (malloc_usable_size), so rounding counts. Needs glibc.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static atomic_llong live, peak;

static void* taken(void* p) {
  if (p == NULL) return p;
  long long size = (long long)malloc_usable_size(p);
  long long now = atomic_fetch_add(&live, size) + size, high = atomic_load(&peak);
  while (now > high && !atomic_compare_exchange_weak(&peak, &high, now)) {
  }
  return p;
}

static void given_back(void* p) {
  if (p != NULL) atomic_fetch_sub(&live, (long long)malloc_usable_size(p));
}

void* malloc(size_t size) { return taken(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void* memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }

int posix_memalign(void** out, size_t alignment, size_t size) {
  void* p = taken(__libc_memalign(alignment, size));
  if (p == NULL) return ENOMEM;
  *out = p;
  return 0;
}

void* realloc(void* old, size_t size) {
  long long before = old == NULL ? 0 : (long long)malloc_usable_size(old);
  void* p = __libc_realloc(old, size);
  if (p == NULL && size != 0) return p;  // the old block is still there
  atomic_fetch_sub(&live, before);
  return taken(p);
}

void free(void* p) {
  given_back(p);
  __libc_free(p);
}

// Starts anew: returns the bytes held now, and counts the peak from here.
long long count_start(void) {
  long long now = atomic_load(&live);
  atomic_store(&peak, now);
  return now;
}

long long count_peak(void) { return atomic_load(&peak); }
