#pragma once
// Catch2 is v2 on Debian 12 and v3 on Ubuntu 24.04; tests include this header and see one interface.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
