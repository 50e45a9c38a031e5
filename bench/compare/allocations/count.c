/* Counts calls of malloc, calloc and realloc in the processes that it is preloaded into, all together.
 *
 * The count is the first eight bytes of the file that BENCH_ALLOCATIONS names, shared by all of them. Python asks
 * malloc for each object where PYTHONMALLOC=malloc; what it takes from its own free lists is no allocation and not
 * counted. Until the file is mapped, and where it cannot be, nothing is counted.
 */

#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);

static _Atomic uint64_t *counter;

__attribute__((constructor)) static void map_counter(void)
{
    const char *name = getenv("BENCH_ALLOCATIONS");
    int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        counter = mapped;
    close(file);
}

static void count(void)
{
    if (counter)
        atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

void *malloc(size_t size)
{
    count();
    return __libc_malloc(size);
}

void *calloc(size_t number, size_t size)
{
    count();
    return __libc_calloc(number, size);
}

void *realloc(void *memory, size_t size)
{
    count();
    return __libc_realloc(memory, size);
}
