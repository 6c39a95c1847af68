/* A machine whose clock jumps and whose disk is slow, for one process and its children (LD_PRELOAD).
 *
 * TROUBLE_MACHINE names a file of two 64-bit numbers, which may change at any time: by how many seconds the clock of
 * the wall is wrong, and how many microseconds each reading, writing and syncing of a file under TROUBLE_FOLDER takes.
 * What the kernel itself says of time (a file's time of modification) stays right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *settings;
static const char *folder;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TROUBLE_MACHINE");
    folder = getenv("TROUBLE_FOLDER");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) settings = mapped;
    close(file);
}

static int64_t wrong(void) { return settings ? settings[0] : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* Whoever waits until a time of the wall waits until that of our clock. Times of the other clock, which counts from the
 * start of the machine, are small. */
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* an older one has another layout */
    if (!real) real = REAL(pthread_cond_timedwait);
    struct timespec right = *until;
    if (right.tv_sec > 1000000000) right.tv_sec -= wrong();
    return real(cond, mutex, &right);
}

static void wait_for_disk(int file) {
    char link[40], path[4096];
    if (!settings || !settings[1] || !folder) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (!strncmp(path, folder, strlen(folder))) usleep((useconds_t)settings[1]);
}

#define SLOW(type, name, declared, ...)              \
    type name declared {                             \
        static __typeof__(&name) real;               \
        if (!real) real = REAL(name);                \
        wait_for_disk(file);                         \
        return real(__VA_ARGS__);                    \
    }

SLOW(ssize_t, read, (int file, void *to, size_t size), file, to, size)
SLOW(ssize_t, pread, (int file, void *to, size_t size, off_t at), file, to, size, at)
SLOW(ssize_t, pread64, (int file, void *to, size_t size, off64_t at), file, to, size, at)
SLOW(ssize_t, write, (int file, const void *from, size_t size), file, from, size)
SLOW(ssize_t, pwrite, (int file, const void *from, size_t size, off_t at), file, from, size, at)
SLOW(ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at), file, from, size, at)
SLOW(int, fsync, (int file), file)
SLOW(int, fdatasync, (int file), file)
