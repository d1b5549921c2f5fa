/* A machine that misbehaves, by LD_PRELOAD: a slow disk and a wall clock that jumps.

   CHAOS_WRITE_DELAY_US   microseconds that every write to and fsync of a file named *state.db* takes longer
   CHAOS_CLOCK_FILE       a file whose first eight bytes are added to CLOCK_REALTIME; int64 seconds, looked at each time
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void delay(int file)
{
    const char* microseconds = getenv("CHAOS_WRITE_DELAY_US");
    if (!microseconds) return;
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strstr(path, "state.db")) usleep((useconds_t)atoi(microseconds));
}

ssize_t pwrite64(int file, const void* bytes, size_t size, off64_t offset)
{
    delay(file);
    return REAL(pwrite64)(file, bytes, size, offset);
}

ssize_t pwrite(int file, const void* bytes, size_t size, off_t offset)
{
    delay(file);
    return REAL(pwrite)(file, bytes, size, offset);
}

int fsync(int file)
{
    delay(file);
    return REAL(fsync)(file);
}

int fdatasync(int file)
{
    delay(file);
    return REAL(fdatasync)(file);
}

static int64_t jump(void)
{
    const char* path = getenv("CHAOS_CLOCK_FILE");
    int64_t seconds = 0;
    if (path) {
        const int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            if (read(file, &seconds, sizeof seconds) != sizeof seconds) seconds = 0;
            close(file);
        }
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec* now)
{
    const int result = REAL(clock_gettime)(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval* now, void* zone)
{
    const int result = REAL(gettimeofday)(now, zone);
    if (result == 0) now->tv_sec += jump();
    return result;
}

time_t time(time_t* out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
