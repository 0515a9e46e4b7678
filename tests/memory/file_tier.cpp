#include "memory/tiers/file_tier.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <set>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;
namespace fs = std::filesystem;

const RecordLayout& layout() {
  // W of several pieces and no multiple of anything, R of one block, M of a byte.
  static const RecordLayout l({{"W", 70001}, {"R", 4096}, {"M", 1}, {"V", 9000}});
  return l;
}

FileTier::Options options(const fs::path& folder, std::int64_t records) {
  FileTier::Options o;
  o.file = {.folder = folder, .rank = 3, .records = records};
  o.piece_bytes = 16384;
  o.name = [](std::int64_t r) {
    return "layer " + std::to_string(r / 4) + ", expert " + std::to_string(r % 4);
  };
  return o;
}

TEST_CASE("record layout: sections from multiples of 4096 on") {
  const RecordLayout& l = layout();
  CHECK(l.stride() == 73728 + 4096 + 4096 + 12288);
  CHECK(l.offset({1, 2}) == 73728);
  CHECK(l.extent({1, 2}) == 8192);
  CHECK(l.bytes({0, 4}) == 70001 + 4096 + 1 + 9000);
  CHECK(l.text({1, 3}) == "R to V");
  CHECK_THROWS_AS(l.extent({3, 2}), InternalError);
  CHECK_THROWS_AS(RecordLayout({}), InternalError);
  CHECK_THROWS_AS(RecordLayout({{"W", 0}}), InternalError);
  // Sizes are of 64 bits.
  const RecordLayout large({{"W", std::uint64_t{5} << 30}});
  CHECK(ScratchFile::bytes_for(large, 1000) == (std::uint64_t{5000} << 30) + 4096);
}

TEST_CASE("file tier: what is written is read, in any ranges, several at once") {
  for (const IoKind kind : queue_kinds()) {
    for (const bool direct : {true, false}) {
      const TemporaryFolder folder("file_tier");
      FileTier::Options o = options(folder.path() / "a" / "b", 12);
      o.file.direct = direct;
      const Image images(12 * layout().stride()), back(12 * layout().stride());
      images.fill(7);
      const auto at = [&](const Image& i, std::int64_t r) {
        return i.data() + static_cast<std::size_t>(r) * layout().stride();
      };
      {
        FileTier tier(layout(), o, open_io_queue(kind, 4, {{images.data(), images.bytes()}}));
        CHECK(tier.queue_name() == (kind == IoKind::threads ? "threads" : "io_uring"));
        CHECK(tier.file_bytes() == 4096 + 12 * layout().stride());
        CHECK(fs::file_size(tier.path()) == tier.file_bytes());
        std::vector<Transfer> transfers;
        for (std::int64_t r = 0; r < 12; ++r) {
          CHECK(!tier.is_written(r, {0, 1}));
          transfers.push_back(tier.write(r, {0, 2}, at(images, r)));
          transfers.push_back(tier.write(r, {2, 2}, at(images, r)));
        }
        for (const Transfer& t : transfers)
          t.wait();
        transfers.clear();
        for (std::int64_t r = 11; r >= 0; --r) {
          transfers.push_back(tier.read(r, {1, 3}, at(back, r)));
          transfers.push_back(tier.read(r, {0, 1}, at(back, r)));
        }
        for (const Transfer& t : transfers) {
          t.wait();
          CHECK(t.is_done());
        }
        for (std::int64_t r = 0; r < 12; ++r)
          CHECK(same_sections(layout(), layout().all(), at(images, r), at(back, r)));
        const auto counters = tier.counters();
        CHECK(counters.writes == 24);
        CHECK(counters.bytes_read == 12 * layout().stride());
      }
      CHECK(fs::is_empty(o.file.folder));  // scratch goes with its process
    }
  }
}

TEST_CASE("file tier: short, interrupted and late requests change nothing but the time") {
  for (const IoKind kind : queue_kinds()) {
    const TemporaryFolder folder("file_tier_short");
    Faults faults{.seed = 5, .cut = 0.3, .short_count = 0.4, .late = 0.5, .delay = 0.1};
    faults.error = [](const IoRequest&, double chance) {
      return chance < 0.15 ? EINTR : chance < 0.3 ? EAGAIN : 0;
    };
    FileTier tier(layout(), options(folder.path(), 4), faulty_queue(kind, 5, faults));
    const Image images(4 * layout().stride()), back(4 * layout().stride());
    for (std::uint64_t round = 0; round < 5; ++round) {
      images.fill(round);
      std::vector<Transfer> transfers;
      for (std::int64_t r = 0; r < 4; ++r)
        transfers.push_back(tier.write(r, layout().all(), images.data() + r * layout().stride()));
      for (const Transfer& t : transfers)
        t.wait();
      transfers.clear();
      for (std::int64_t r = 0; r < 4; ++r)
        transfers.push_back(tier.read(r, layout().all(), back.data() + r * layout().stride()));
      for (const Transfer& t : transfers)
        t.wait();
      for (std::int64_t r = 0; r < 4; ++r)
        CHECK(same_sections(layout(),
                            layout().all(),
                            images.data() + r * layout().stride(),
                            back.data() + r * layout().stride()));
    }
    CHECK(tier.counters().retries > 20);
    for (const std::string& note : tier.notes())
      CHECK(!contains(note, "first transfer"));  // no rest of a request began at an odd place
  }
}

TEST_CASE("file tier: errors name file, offset, section and what to do, and pass") {
  for (const IoKind kind : queue_kinds()) {
    const TemporaryFolder folder("file_tier_errors");
    const auto error = std::make_shared<std::atomic<int>>(0);
    Faults faults;
    // The second piece of W of record 2.
    faults.error = [error](const IoRequest& r, double) {
      return r.offset == 4096 + 2 * layout().stride() + 16384 ? error->load() : 0;
    };
    FileTier tier(layout(), options(folder.path(), 4), faulty_queue(kind, 4, faults));
    const Image image(layout().stride()), back(layout().stride());
    image.fill(1);
    const std::string where = tier.path().string() + ": offset " +
                              std::to_string(4096 + 2 * layout().stride() + 16384) +
                              ": sections W to V of layer 0, expert 2";
    tier.write(2, layout().all(), image.data()).wait();
    *error = EIO;
    std::string text =
        message_of<ResourceError>([&] { tier.read(2, layout().all(), back.data()).wait(); });
    CHECK(contains(text, where));
    CHECK(contains(text, "reading 16384 bytes failed: Input/output error"));
    CHECK(contains(text, "memory.file_path"));
    tier.read(1 + 1, {1, 3}, back.data()).wait();  // other sections are fine
    *error = 0;
    tier.read(2, layout().all(), back.data()).wait();  // a read may be tried again
    CHECK(same_sections(layout(), layout().all(), image.data(), back.data()));
    *error = ENOSPC;
    text = message_of<ResourceError>([&] { tier.write(2, layout().all(), image.data()).wait(); });
    CHECK(contains(text, where));
    CHECK(contains(text, "no space for 16384 bytes"));
    CHECK(contains(text, "memory.file_budget"));
    *error = 0;
    CHECK(!tier.is_written(2, {0, 1}));  // nobody knows what is there
    CHECK_THROWS_AS(tier.read(2, {0, 1}, back.data()), InternalError);
    tier.write(2, layout().all(), image.data()).wait();
    tier.read(2, layout().all(), back.data()).wait();
    // An error that does not pass ends the transfer, too.
    *error = EAGAIN;
    CHECK_THROWS_AS(tier.read(2, {0, 1}, back.data()).wait(), ResourceError);
    *error = 0;
  }
}

TEST_CASE("file tier: a damaged section, a stale one and a file cut short are found") {
  const TemporaryFolder folder("file_tier_damage");
  for (const IoKind kind : queue_kinds()) {
    FileTier::Options o = options(folder.path(), 8);
    FileTier tier(layout(), o, open_io_queue(kind, 4));
    const Image image(layout().stride()), back(layout().stride());
    const auto at = [&](std::int64_t record, std::uint64_t offset) {
      return static_cast<std::streamoff>(
          4096 + static_cast<std::uint64_t>(record) * layout().stride() + offset);
    };
    for (std::int64_t r = 0; r < 8; ++r) {
      image.fill(static_cast<std::uint64_t>(r));
      tier.write(r, layout().all(), image.data()).wait();
    }
    {
      std::fstream file(tier.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(at(6, layout().section(3).offset + 8999));
      const char flipped = static_cast<char>(~0);
      image.fill(6);
      const auto was = static_cast<char>(image.data()[layout().section(3).offset + 8999]);
      file.put(static_cast<char>(was ^ flipped));
    }
    const std::string text =
        message_of<InputError>([&] { tier.read(6, layout().all(), back.data()).wait(); });
    CHECK(contains(text, "section V of layer 1, expert 2 has checksum"));
    CHECK(contains(text, "offset " + std::to_string(at(6, layout().section(3).offset))));
    tier.read(6, {0, 3}, back.data()).wait();

    // A write that the disk lost: the record of another time in its place.
    std::string old(layout().stride(), 0);
    std::fstream(tier.path(), std::ios::in | std::ios::binary)
        .seekg(at(5, 0))
        .read(old.data(), static_cast<std::streamsize>(old.size()));
    image.fill(50);
    tier.write(5, layout().all(), image.data()).wait();
    std::fstream(tier.path(), std::ios::in | std::ios::out | std::ios::binary)
        .seekp(at(5, 0))
        .write(old.data(), static_cast<std::streamsize>(old.size()));
    CHECK_THROWS_AS(tier.read(5, {0, 1}, back.data()).wait(), InputError);

    fs::resize_file(tier.path(), static_cast<std::uintmax_t>(at(7, 4096)));
    CHECK(contains(message_of<InputError>([&] {
                     tier.read(7, {0, 1}, back.data()).wait();
                   }),
                   "somebody cut it"));
  }
  FileTier::Options trusting = options(folder.path(), 1);
  trusting.verify_reads = false;
  FileTier tier(layout(), trusting, open_io_queue(IoKind::threads, 1));
  const Image image(layout().stride());
  tier.write(0, {0, 1}, image.data()).wait();
  std::fstream(tier.path(), std::ios::in | std::ios::out | std::ios::binary).seekp(4096).put(1);
  tier.read(0, {0, 1}, image.data()).wait();
  CHECK(image.data()[0] == std::byte{1});
}

TEST_CASE("file tier: where direct requests are refused, it goes on without, and says so once") {
  for (const IoKind kind : queue_kinds()) {
    const TemporaryFolder folder("file_tier_direct");
    Faults faults{.late = 0.3};
    const auto refusals = std::make_shared<int>(0);
    faults.error = [refusals](const IoRequest& r, double) {
      const bool direct = (::fcntl(r.fd, F_GETFL) & O_DIRECT) != 0;
      *refusals += direct ? 1 : 0;
      return direct ? EINVAL : 0;
    };
    FileTier tier(layout(), options(folder.path(), 4), faulty_queue(kind, 4, faults));
    const Image image(layout().stride()), back(layout().stride());
    image.fill(3);
    for (std::int64_t r = 0; r < 4; ++r)
      tier.write(r, layout().all(), image.data()).wait();
    tier.read(3, layout().all(), back.data()).wait();
    CHECK(same_sections(layout(), layout().all(), image.data(), back.data()));
    CHECK(*refusals >= 1);
    const auto notes = tier.notes();
    CHECK(std::count_if(notes.begin(), notes.end(), [](const std::string& n) {
            return contains(n, "O_DIRECT: refused at the first transfer");
          }) == 1);
    // EINVAL for another reason is an error.
    Faults other;
    other.error = [](const IoRequest&, double) { return EINVAL; };
    FileTier::Options o = options(folder.path(), 1);
    o.file.rank = 4;
    o.file.direct = false;
    FileTier refusing(layout(), o, faulty_queue(kind, 1, other));
    CHECK_THROWS_AS(refusing.write(0, {0, 1}, image.data()).wait(), ResourceError);
  }
}

TEST_CASE("file tier: in memory of the system (tmpfs) it works like on a disk") {
  if (!fs::is_directory("/dev/shm")) return;
  const fs::path folder =
      fs::path("/dev/shm") / ("moesaic_file_tier_" + std::to_string(::getpid()));
  for (const IoKind kind : queue_kinds()) {
    FileTier tier(layout(), options(folder, 2), open_io_queue(kind, 2));
    const Image image(layout().stride()), back(layout().stride());
    image.fill(9);
    tier.write(1, layout().all(), image.data()).wait();
    tier.read(1, layout().all(), back.data()).wait();
    CHECK(same_sections(layout(), layout().all(), image.data(), back.data()));
  }
  fs::remove_all(folder);
}

TEST_CASE("file tier: no room, no budget, somebody else's file") {
  const TemporaryFolder folder("file_tier_start");
  const auto open = [&](std::int64_t records, std::uint64_t budget = ~std::uint64_t{0}) {
    FileTier::Options o = options(folder.path(), records);
    o.file.lock_wait_s = 0.05;
    o.budget_bytes = budget;
    return std::make_unique<FileTier>(layout(), o, open_io_queue(IoKind::threads, 1));
  };
  const std::int64_t absurd = std::int64_t{1} << 40;
  std::string text = message_of<ResourceError>([&] { open(absurd); });
  CHECK(contains(text,
                 "needs " + std::to_string(ScratchFile::bytes_for(layout(), absurd)) + " bytes"));
  CHECK(contains(text, "are free there"));
  CHECK(contains(text, "memory.file_budget"));
  CHECK(fs::is_empty(folder.path()));  // nothing stays reserved
  text = message_of<ResourceError>([&] { open(4, 4 * layout().stride()); });
  CHECK(contains(text, std::to_string(4 * layout().stride() + 4096)));
  CHECK(contains(text, "memory.file_budget is " + std::to_string(4 * layout().stride())));

  const auto first = open(4, 4 * layout().stride() + 4096);
  CHECK(contains(message_of<UsageError>([&] { open(4); }), "another run uses this file"));
  CHECK(fs::exists(first->path()));

  FileTier::Options o = options(folder.path(), 1);
  o.file.rank = 8;
  const fs::path theirs = folder.path() / "moesaic-tier-rank-00008.bin";
  std::ofstream(theirs) << "a letter";
  CHECK(contains(
      message_of<UsageError>([&] { FileTier(layout(), o, open_io_queue(IoKind::threads, 1)); }),
      "is not a file of the file tier"));
  CHECK(fs::file_size(theirs) == 8);
  // What a killed process left is taken over.
  fs::copy_file(first->path(), theirs, fs::copy_options::overwrite_existing);
  FileTier again(layout(), o, open_io_queue(IoKind::threads, 1));
  CHECK(fs::file_size(theirs) == again.file_bytes());
  const Image image(layout().stride());
  CHECK_THROWS_AS(again.read(0, {0, 1}, image.data()), InternalError);  // but not trusted

  o.file.folder = theirs / "below a file";
  CHECK_THROWS_AS(FileTier(layout(), o, open_io_queue(IoKind::threads, 1)), ResourceError);
}

TEST_CASE(
    "file tier: a process killed in the middle of writing leaves a file that the next one takes "
    "over") {
  const TemporaryFolder folder("file_tier_killed");
  std::array<int, 2> ends{};
  REQUIRE(::pipe(ends.data()) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    FileTier tier(layout(), options(folder.path(), 4), open_io_queue(IoKind::automatic, 4));
    const Image image(4 * layout().stride());
    for (int round = 0;; ++round) {
      std::vector<Transfer> running;
      for (std::int64_t r = 0; r < 4; ++r)
        running.push_back(tier.write(r, layout().all(), image.data() + r * layout().stride()));
      if (round == 2 && ::write(ends[1], "x", 1) != 1) ::_exit(1);
      for (const Transfer& t : running)
        t.wait();
    }
  }
  char ready = 0;
  REQUIRE(::read(ends[0], &ready, 1) == 1);
  REQUIRE(::kill(child, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  ::close(ends[0]);
  ::close(ends[1]);
  const fs::path left = folder.path() / "moesaic-tier-rank-00003.bin";
  CHECK(fs::exists(left));
  {
    FileTier tier(layout(), options(folder.path(), 2), open_io_queue(IoKind::automatic, 4));
    CHECK(tier.path() == left);
    CHECK(!tier.is_written(0, {0, 1}));
    CHECK(fs::file_size(left) == tier.file_bytes());
    const Image image(layout().stride());
    tier.write(1, layout().all(), image.data()).wait();
    tier.read(1, layout().all(), image.data()).wait();
  }
  CHECK(!fs::exists(left));
}

TEST_CASE("file tier: what killed runs left for a rank is removed, and nothing else") {
  const TemporaryFolder folder("file_tier_leftovers");
  ScratchFile::remove_leftovers(folder.path(), 3);  // there is no such folder
  fs::path in_use;
  {
    const auto open = [&](std::int64_t rank, const std::string& name) {
      return ScratchFile({.folder = folder.path(), .rank = rank, .name = name, .records = 2},
                         layout());
    };
    const ScratchFile alive = open(3, "down-weights");
    in_use = alive.path();
    const auto leave = [&](const std::string& name) {
      fs::copy_file(in_use, folder.path() / name);
      return folder.path() / name;
    };
    const fs::path left[] = {leave("moesaic-tier-rank-00003.bin"),
                             leave("moesaic-tier-rank-00003-down-states.bin")};
    const fs::path other_rank = leave("moesaic-tier-rank-00004-down-states.bin"),
                   other_number = leave("moesaic-tier-rank-000030-down-states.bin"),
                   other_name = leave("results.bin"),
                   letter = folder.path() / "moesaic-tier-rank-00003-letter.bin",
                   link = folder.path() / "moesaic-tier-rank-00003-link.bin",
                   below = folder.path() / "moesaic-tier-rank-00003-folder.bin";
    std::ofstream(letter) << "a letter";
    std::ofstream(left[1], std::ios::trunc);  // killed before it wrote anything
    fs::create_symlink(other_name, link);
    fs::create_directory(below);
    ScratchFile::remove_leftovers(folder.path(), 3, 0.05);
    for (const fs::path& p : left)
      CHECK(!fs::exists(p));
    for (const fs::path& p : {in_use, other_rank, other_number, other_name, letter, link, below})
      CHECK(fs::exists(p));
    CHECK(contains(message_of<UsageError>([&] {
                     ScratchFile({.folder = folder.path(),
                                  .rank = 3,
                                  .name = "down-weights",
                                  .records = 2,
                                  .lock_wait_s = 0.05},
                                 layout());
                   }),
                   "another run uses this file"));
  }
  CHECK(!fs::exists(in_use));
}

TEST_CASE("file tier: it ends when its transfers have") {
  const TemporaryFolder folder("file_tier_end");
  const Image images(8 * layout().stride());
  std::vector<Transfer> transfers;
  {
    FileTier tier(layout(),
                  options(folder.path(), 8),
                  faulty_queue(IoKind::automatic, 2, {.late = 0.5, .delay = 0.5}));
    for (std::int64_t r = 0; r < 8; ++r)
      transfers.push_back(tier.write(r, layout().all(), images.data() + r * layout().stride()));
  }
  for (const Transfer& t : transfers) {
    CHECK(t.is_done());
    t.wait();
  }
}

TEST_CASE("file tier: transfers that would race are bugs") {
  const TemporaryFolder folder("file_tier_misuse");
  Faults slow{.delay = 1};
  const auto held = std::make_shared<std::atomic<bool>>(true);
  slow.error = [held](const IoRequest&, double) {
    while (held->load())
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    return 0;
  };
  FileTier tier(layout(), options(folder.path(), 2), faulty_queue(IoKind::threads, 2, slow));
  const Image image(layout().stride());
  const Transfer first = tier.write(0, {0, 2}, image.data());
  CHECK(!first.is_done());
  CHECK_THROWS_AS(tier.write(0, {1, 1}, image.data()), InternalError);
  CHECK_THROWS_AS(tier.read(0, {0, 1}, image.data()), InternalError);
  const Transfer other = tier.write(0, {2, 2}, image.data());
  *held = false;
  first.wait();
  other.wait();
  *held = true;
  const Transfer read = tier.read(0, {0, 1}, image.data());
  const Image back(layout().stride());
  const Transfer same = tier.read(0, {0, 1}, back.data());  // two readers do not mind each other
  CHECK_THROWS_AS(tier.write(0, {0, 1}, image.data()), InternalError);
  *held = false;
  read.wait();
  same.wait();
  CHECK_THROWS_AS(tier.read(0, {0, 1}, image.data() + 512), InternalError);
  CHECK_THROWS_AS(tier.read(2, {0, 1}, image.data()), InternalError);
  CHECK_THROWS_AS(tier.read(0, {0, 5}, image.data()), InternalError);
}

TEST_CASE(
    "file tier: with too little memory that may be locked, io_uring goes on without registered "
    "memory") {
  if (queue_kinds().size() < 2) return;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    rlimit limit{65536, 65536};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) ::_exit(3);
    if (::geteuid() == 0 && ::seteuid(65534) != 0) ::_exit(3);  // root may lock as much as it likes
    const Image image(std::size_t{1} << 20);
    const OpenedQueue opened = try_uring_queue(2, {{image.data(), image.bytes()}});
    // Older kernels charge the ring itself.
    if (!opened.queue) ::_exit(contains(opened.notes.at(0), "ulimit -l") ? 0 : 4);
    if (opened.notes.size() != 1 ||
        !contains(opened.notes[0], "a limit of 64 KiB of locked memory"))
      ::_exit(5);
    ::_exit(contains(opened.notes[0], "ulimit -l unlimited") ? 0 : 6);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE(
    "queues: io_uring that is asked for and cannot be had is an error; threads take its place "
    "otherwise") {
  const OpenedQueue automatic = open_io_queue(IoKind::automatic, 3);
  CHECK(automatic.queue->depth() == 3);
  if (queue_kinds().size() < 2) {
    CHECK(automatic.queue->name() == "threads");
    CHECK(automatic.notes.size() == 1);
    CHECK_THROWS_AS(open_io_queue(IoKind::uring, 3), ResourceError);
  } else {
    CHECK(automatic.queue->name() == "io_uring");
    CHECK(automatic.notes.empty());
  }
}

// test_memory "[.speed]": not a test; what the disk under the temporary folder gives.
TEST_CASE("file tier: speed of records of 64 MiB", "[.speed]") {
  const RecordLayout large({{"W", 16 << 20}, {"S", 48 << 20}});
  constexpr std::int64_t kRecords = 16;
  const TemporaryFolder folder("file_tier_speed");
  const Image images(4 * large.stride());
  images.fill(1);
  for (const IoKind kind : queue_kinds()) {
    for (const int depth : {1, 4, 8}) {
      FileTier::Options o;
      o.file = {.folder = folder.path(), .records = kRecords};
      FileTier tier(large, o, open_io_queue(kind, depth, {{images.data(), images.bytes()}}));
      const auto rate = [&](auto&& transfer) {
        const auto start = std::chrono::steady_clock::now();
        std::vector<Transfer> running;
        for (std::int64_t r = 0; r < kRecords; ++r) {
          if (r >= 4) running[static_cast<std::size_t>(r - 4)].wait();
          running.push_back(transfer(r, images.data() + (r % 4) * large.stride()));
        }
        for (const Transfer& t : running)
          t.wait();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        return static_cast<double>(kRecords) * static_cast<double>(large.stride()) / seconds / 1e9;
      };
      const double first =
          rate([&](std::int64_t r, std::byte* at) { return tier.write(r, large.all(), at); });
      const double write =
          rate([&](std::int64_t r, std::byte* at) { return tier.write(r, large.all(), at); });
      const double read =
          rate([&](std::int64_t r, std::byte* at) { return tier.read(r, large.all(), at); });
      WARN(tier.queue_name() << ", depth " << depth << ": write into new space " << first
                             << " GB/s, over old " << write << ", read " << read);
    }
  }
}

}  // namespace
}  // namespace moesaic::test
