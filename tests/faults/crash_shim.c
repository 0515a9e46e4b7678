// Preloaded into moesaic by the tests beside it: counts the calls that change files below a folder, and has a fault at the
// k-th one. Without further words that is a crash: half of a write (a torn one) or nothing of another call is performed, and
// the process ends with SIGKILL.
//
//   FAULT_FOLDER  absolute path; only calls on files below it, or on the folder itself, count
//   FAULT_AT      number of the call at which to die, from 1; unset: none, calls are only counted
//   FAULT_RANK    only in this MPI rank (OMPI_COMM_WORLD_RANK); unset: in every process
//   FAULT_VICTIM  a file: the ranks other than FAULT_RANK write their process id there, and that process is killed in
//                 place of the one that counts
//   FAULT_ERROR   in place of a crash the call does nothing and fails: EIO, ENOSPC, EDQUOT, EINTR
//   FAULT_SHORT   in place of a crash the call, if it is a write, does half of it and says so
//   FAULT_FILL    in place of a crash this file grows until the disk is full; then the call is performed
//   FAULT_CLOSES  set: closing a file that was open for writing counts, too (it fails after it was done)
//   FAULT_LOG     file that gets one line per counted call
//   FAULT_DELAY   milliseconds that every counted pwrite() takes longer
//   FAULT_RING    set: io_uring_submit() counts, too, whatever it submits, and the crash comes when the kernel has the requests
//   FAULT_NO_RING set: the kernel gives no io_uring
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long calls;

static void* next(const char* name) {
  return dlsym(RTLD_NEXT, name);
}
#define NEXT(name) ((__typeof__(&name))next(#name))

static int is_below(const char* path) {
  const char* folder = getenv("FAULT_FOLDER");
  if (!folder) return 0;
  const size_t n = strlen(folder);
  return strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int path_of_descriptor(int fd, char* out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, out, PATH_MAX - 1);
  out[n > 0 ? n : 0] = 0;
  return n > 0;
}

static const char* absolute(int folder, const char* path, char* out) {
  if (path[0] == '/') return path;
  char base[PATH_MAX] = "";
  if (folder == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) base[0] = 0;
  } else {
    path_of_descriptor(folder, base);
  }
  if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) out[0] = 0;
  return out;
}

static int error_of(const char* name) {
  static const struct {
    const char* name;
    int number;
  } kErrors[] = {{"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EINTR", EINTR}};
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i) {
    if (strcmp(name, kErrors[i].name) == 0) return kErrors[i].number;
  }
  abort();  // the test must not pass for want of a fault
}

static void fill_disk(const char* file) {
  static const char zeros[1 << 16];
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) abort();
  for (size_t n = sizeof zeros; n > 0;) {
    if (syscall(SYS_write, fd, zeros, n) <= 0) n /= 2;
  }
  syscall(SYS_close, fd);
}

static void die(void) {
  const char* file = getenv("FAULT_VICTIM");
  long victim = getpid();
  if (file) {
    FILE* f = fopen(file, "r");
    if (!f || fscanf(f, "%ld", &victim) != 1)
      abort();  // the test must not pass for want of a victim
    fclose(f);
  }
  kill((pid_t)victim, SIGKILL);
}

// The fault of a call: whether it fails (errno says why). May not return.
static int fault(void) {
  const char* error = getenv("FAULT_ERROR");
  if (error) {
    errno = error_of(error);
    return 1;
  }
  const char* fill = getenv("FAULT_FILL");
  if (fill) {
    fill_disk(fill);
  } else if (!getenv("FAULT_SHORT")) {
    die();
  }
  return 0;
}

// Of a write: what it returns, or -2 when it is to be performed as always.
static ssize_t write_fault(int fd, const void* data, size_t bytes) {
  const int crashes = !getenv("FAULT_ERROR") && !getenv("FAULT_FILL") && !getenv("FAULT_VICTIM");
  if (bytes > 1 && crashes) {
    const ssize_t half = syscall(SYS_write, fd, data, bytes / 2);
    if (getenv("FAULT_SHORT")) return half;
  }
  return fault() ? -1 : -2;
}

static void append_log(const char* call, const char* path) {
  const char* log = getenv("FAULT_LOG");
  if (!log) return;
  char line[PATH_MAX + 64];
  const int n = snprintf(line, sizeof line, "%ld %s %s\n", calls, call, path);
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (fd < 0) abort();
  syscall(SYS_write, fd, line, n);
  syscall(SYS_close, fd);
}

static int is_counting_rank(void) {
  const char* rank = getenv("FAULT_RANK");
  const char* mine = getenv("OMPI_COMM_WORLD_RANK");
  return !rank || (mine && strcmp(rank, mine) == 0);
}

__attribute__((constructor)) static void say_who_is_the_victim(void) {
  const char* file = getenv("FAULT_VICTIM");
  if (!file || is_counting_rank()) return;
  FILE* f = fopen(file, "w");
  if (!f || fprintf(f, "%ld\n", (long)getpid()) < 0 || fclose(f) != 0) abort();
}

// Counts the call, if it is one that counts; whether it is the last.
static int count(const char* call, const char* path) {
  if (!is_below(path) || !is_counting_rank()) return 0;
  pthread_mutex_lock(&lock);
  ++calls;
  append_log(call, path);
  const char* at = getenv("FAULT_AT");
  const int now = at && atol(at) == calls;
  pthread_mutex_unlock(&lock);
  return now;
}

static int count_descriptor(const char* call, int fd) {
  char path[PATH_MAX];
  return path_of_descriptor(fd, path) ? count(call, path) : 0;
}

// EXPRESSION, unless the call is the one and fails: then -1.
#define BEFORE(is_last, expression)    \
  if ((is_last) && fault()) return -1; \
  return expression

ssize_t write(int fd, const void* data, size_t bytes) {
  if (count_descriptor("write", fd)) {
    const ssize_t done = write_fault(fd, data, bytes);
    if (done != -2) return done;
  }
  return NEXT(write)(fd, data, bytes);
}

// A write at a place, torn at a multiple of what direct writes need.
static int place_fault(int fd, const void* data, size_t bytes, off64_t at) {
  const int crashes = !getenv("FAULT_ERROR") && !getenv("FAULT_FILL") && !getenv("FAULT_VICTIM");
  const size_t half = bytes / 2 & ~(size_t)4095;
  if (crashes && half > 0) syscall(SYS_pwrite64, fd, data, half, at);
  return fault();
}

static int count_placed(const char* call, int fd) {
  char path[PATH_MAX];
  if (!path_of_descriptor(fd, path) || !is_below(path)) return 0;
  const char* delay = getenv("FAULT_DELAY");
  if (delay) {
    const struct timespec wait = {atol(delay) / 1000, atol(delay) % 1000 * 1000000};
    nanosleep(&wait, NULL);
  }
  return count(call, path);
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  if (count_placed("pwrite", fd) && place_fault(fd, data, bytes, at)) return -1;
  return NEXT(pwrite)(fd, data, bytes, at);
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) {
  if (count_placed("pwrite64", fd) && place_fault(fd, data, bytes, at)) return -1;
  return NEXT(pwrite64)(fd, data, bytes, at);
}

// Of liburing. What a ring holds is not looked at.
struct io_uring;
int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags);
int io_uring_submit(struct io_uring* ring);

int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags) {
  if (getenv("FAULT_NO_RING")) return -ENOSYS;
  return NEXT(io_uring_queue_init)(entries, ring, flags);
}

int io_uring_submit(struct io_uring* ring) {
  const int submitted = NEXT(io_uring_submit)(ring);
  const char* folder = getenv("FAULT_FOLDER");
  if (getenv("FAULT_RING") && folder && count("io_uring_submit", folder)) die();
  return submitted;
}

ssize_t writev(int fd, const struct iovec* parts, int n) {
  if (count_descriptor("writev", fd)) {
    const ssize_t done =
        n > 0 ? write_fault(fd, parts[0].iov_base, parts[0].iov_len) : (fault() ? -1 : -2);
    if (done != -2) return done;
  }
  return NEXT(writev)(fd, parts, n);
}

int close(int fd) {
  const int flags = getenv("FAULT_CLOSES") ? fcntl(fd, F_GETFL) : -1;
  const int counts = flags != -1 && (flags & O_ACCMODE) != O_RDONLY;
  const int is_last = counts && count_descriptor("close", fd);
  const int result = NEXT(close)(fd);
  if (is_last && fault()) return -1;
  return result;
}

int fsync(int fd) {
  BEFORE(count_descriptor("fsync", fd), NEXT(fsync)(fd));
}

int fdatasync(int fd) {
  BEFORE(count_descriptor("fdatasync", fd), NEXT(fdatasync)(fd));
}

int ftruncate(int fd, off_t size) {
  BEFORE(count_descriptor("ftruncate", fd), NEXT(ftruncate)(fd, size));
}

int ftruncate64(int fd, off64_t size) {
  BEFORE(count_descriptor("ftruncate64", fd), NEXT(ftruncate64)(fd, size));
}

// Of a move the new name counts: both lie in one folder here.
int rename(const char* from, const char* to) {
  char path[PATH_MAX];
  BEFORE(count("rename", absolute(AT_FDCWD, to, path)), NEXT(rename)(from, to));
}

int renameat(int at, const char* from, int to_at, const char* to) {
  char path[PATH_MAX];
  BEFORE(count("renameat", absolute(to_at, to, path)), NEXT(renameat)(at, from, to_at, to));
}

int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) {
  char path[PATH_MAX];
  BEFORE(count("renameat2", absolute(to_at, to, path)),
         NEXT(renameat2)(at, from, to_at, to, flags));
}

int unlink(const char* file) {
  char path[PATH_MAX];
  BEFORE(count("unlink", absolute(AT_FDCWD, file, path)), NEXT(unlink)(file));
}

int unlinkat(int at, const char* file, int flags) {
  char path[PATH_MAX];
  BEFORE(count("unlinkat", absolute(at, file, path)), NEXT(unlinkat)(at, file, flags));
}

int rmdir(const char* folder) {
  char path[PATH_MAX];
  BEFORE(count("rmdir", absolute(AT_FDCWD, folder, path)), NEXT(rmdir)(folder));
}

int remove(const char* file) {
  char path[PATH_MAX];
  BEFORE(count("remove", absolute(AT_FDCWD, file, path)), NEXT(remove)(file));
}

int mkdir(const char* folder, mode_t mode) {
  char path[PATH_MAX];
  BEFORE(count("mkdir", absolute(AT_FDCWD, folder, path)), NEXT(mkdir)(folder, mode));
}

// Making a file changes the folder too; opening one that exists does not count.
#define OPEN(name)                                                                          \
  int name(const char* file, int flags, ...) {                                              \
    mode_t mode = 0;                                                                        \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                    \
      va_list rest;                                                                         \
      va_start(rest, flags);                                                                \
      mode = va_arg(rest, mode_t);                                                          \
      va_end(rest);                                                                         \
    }                                                                                       \
    int (*const real)(const char*, int, ...) = (int (*)(const char*, int, ...))next(#name); \
    if (!(flags & O_CREAT)) return real(file, flags, mode);                                 \
    char path[PATH_MAX];                                                                    \
    BEFORE(count(#name, absolute(AT_FDCWD, file, path)), real(file, flags, mode));          \
  }
// Streams open their files inside the C library.
#define OPEN_STREAM(name)                                                     \
  FILE* name(const char* file, const char* mode) {                            \
    if (mode[0] == 'r') return NEXT(name)(file, mode);                        \
    char path[PATH_MAX];                                                      \
    if (count(#name, absolute(AT_FDCWD, file, path)) && fault()) return NULL; \
    return NEXT(name)(file, mode);                                            \
  }
OPEN_STREAM(fopen)
OPEN_STREAM(fopen64)
OPEN(open)
OPEN(open64)
